"""An explanation also tells what a router had foretold."""

from collections.abc import Callable, Sequence

import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.entrypoints.openai.conftest import Served
from vllm.config import VllmConfig
from vllm.config.observability import ObservabilityConfig
from vllm.entrypoints.openai import explain_routes
from vllm.entrypoints.openai.peer_servers import PeerServers
from vllm.v1.engine.data_parallel.predictions import Prediction
from vllm.v1.messages import PrefillStats


async def test_a_prediction_is_told_with_the_explanation(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def replay(ids: Sequence[str], path: str, *, remedies: bool) -> Response:
        assert (path, remedies) == ("/tmp/trace", True)
        return Response(b'{"request_id":"%s"}' % ids[0].encode())

    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setattr(explain_routes, "_explain", replay)
    config = VllmConfig(observability_config=ObservabilityConfig(cache_trace="/tmp/trace"))
    served = serve(config=config)
    served.engine.predictions["cmpl-a"] = Prediction(32, 64, "late", 1)
    told = (await served.client.get("/v1/cache/explain/cmpl-a")).json()
    assert told == {
        "request_id": "cmpl-a",
        "prediction": {"predicted_tokens": 32, "cached_tokens": 64, "outcome": "late", "core": 1},
    }
    told = (await served.client.get("/v1/cache/explain/cmpl-b")).json()
    assert told == {"request_id": "cmpl-b"}


async def test_a_record_is_replayed_once_however_many_processes_there_are(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_replays = 0

    async def replay(ids: Sequence[str], path: str, *, remedies: bool) -> Response:
        nonlocal num_replays
        num_replays += 1
        return Response(b"{}", 404)

    class Peers:
        """Asks the same process as another one would."""

        has_asked = staticmethod(PeerServers.has_asked)

        async def ask(self, request: Request) -> Response | None:
            headers = {"x-vllm-peer": "1"}
            reply = await served.client.get(request.url.path, headers=headers)
            return None if reply.status_code == 404 else Response(reply.content)

    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setattr(explain_routes, "_explain", replay)
    config = VllmConfig(observability_config=ObservabilityConfig(cache_trace="/tmp/trace"))
    served = serve(config=config)
    served.app.state.peers = Peers()
    assert (await served.client.get("/v1/cache/explain/nobody")).status_code == 404
    assert num_replays == 1


async def test_without_a_record_it_tells_where_a_hit_came_from(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    served = serve()
    served.engine.admissions["cmpl-a"] = PrefillStats(
        1000,
        896,
        dense_match_tokens=256,
        miss_tokens={"above_last_boundary": 8, "first_seen": 32, "evicted_from_disk": 64},
        num_external_tokens=640,
        external_sources={"host": 128, "disk": 512},
    )
    served.engine.predictions["cmpl-a"] = Prediction(256, 896, "late", 1)
    told = (await served.client.get("/v1/cache/explain/cmpl-a")).json()
    assert told == {
        "request_id": "cmpl-a",
        "prompt_tokens": 1000,
        "cached_tokens": 896,
        "sources": {"pool": 256, "host": 128, "disk": 512},
        "dense_match_tokens": 256,
        "spans": [
            {"begin": 896, "end": 960, "reason": "evicted_from_disk"},
            {"begin": 960, "end": 992, "reason": "first_seen"},
            {"begin": 992, "end": 1000, "reason": "above_last_boundary"},
        ],
        "prediction": {"predicted_tokens": 256, "cached_tokens": 896, "outcome": "late", "core": 1},
    }
    unknown = await served.client.get("/v1/cache/explain/cmpl-b")
    assert unknown.status_code == 404
    assert "--cache-trace" in unknown.json()["error"]["message"]


async def test_two_requests_are_compared(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    served = serve()
    ids = []
    for system, said in (("A", "Hello"), ("A", "Hello"), ("B", "Goodbye")):
        body = {"system": system, "messages": [{"role": "user", "content": said}]}
        body |= {"max_tokens": 2, "diagnostics": {"previous_message_id": None}}
        message = (await served.client.post("/v1/messages", json=body)).json()
        ids.append(message["id"])
        served.engine.admissions[message["id"]] = PrefillStats(10, 0, 0, {"first_seen": 10})
    for other, differs in ((1, []), (2, ["system", "messages[0]"])):
        place = f"/v1/cache/explain/{ids[other]}?earlier={ids[0]}"
        told = (await served.client.get(place)).json()["comparison"]
        assert told["earlier"] == ids[0]
        assert told["differs"] == differs
        same = told["shared_tokens"] == told["earlier_tokens"] == told["prompt_tokens"]
        assert same is (differs == [])
    # Of a request that is not remembered, nothing is told.
    told = (await served.client.get(f"/v1/cache/explain/{ids[1]}?earlier=x")).json()
    assert "comparison" not in told
