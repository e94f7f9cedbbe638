"""The routes that generate nothing."""

from collections.abc import Callable

from tests.entrypoints.openai.conftest import Served
from vllm.config import VllmConfig
from vllm.config.kv_events import KVEventsConfig


async def test_models(served: Served) -> None:
    models = (await served.client.get("/v1/models")).json()
    assert models["object"] == "list"
    assert (await served.client.get("/v1/models/")).json() == models
    assert [card["id"] for card in models["data"]] == ["tiny", "alias"]
    card = (await served.client.get("/v1/models/alias")).json()
    assert card == models["data"][1]
    assert (card["root"], card["max_model_len"]) == ("deepseek-v4", 64)
    assert "embedded" in card["note"]
    missing = await served.client.get("/v1/models/owner/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "model"


async def test_version_says_what_this_is(served: Served) -> None:
    version = (await served.client.get("/version")).json()
    assert version["version"]
    assert "not the vllm-project's engine" in version["description"]


async def test_unknown_route_and_method(served: Served) -> None:
    for method, path, status in (("GET", "/x", 404), ("GET", "/tokenize", 405)):
        response = await served.client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["code"] == status


async def test_the_schema_tells_the_real_statuses(served: Served) -> None:
    document = (await served.client.get("/openapi.json")).json()
    responses = document["paths"]["/v1/completions"]["post"]["responses"]
    assert "400" in responses
    assert "422" not in responses
    assert (await served.client.get("/docs")).status_code == 200


async def test_sources_of_kv_events(serve: Callable[..., Served]) -> None:
    events = KVEventsConfig(True, endpoint="tcp://*:7", replay_endpoint="tcp://*:8", topic="kv")
    served = serve(config=VllmConfig(kv_events_config=events))
    assert (await served.client.get("/kv_event_sources")).json() == {
        "sources": [
            {
                "data_parallel_rank": 0,
                "publisher": "zmq",
                "endpoint": "tcp://*:7",
                "replay_endpoint": "tcp://*:8",
                "topic": "kv",
            }
        ]
    }
    for off in (None, KVEventsConfig(), KVEventsConfig(True, "null")):
        served = serve(config=VllmConfig(kv_events_config=off))
        assert (await served.client.get("/kv_event_sources")).json() == {"sources": []}
