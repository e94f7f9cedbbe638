"""The edge: keys, phases, sizes, CORS, metrics."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from vllm.entrypoints.openai import middleware
from vllm.entrypoints.openai.operations_args import OperationsArgs
from vllm.logger import setup_logging

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 1}


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer k1", 200),
        ("bearer k2", 200),
        ("Bearer k", 401),
        ("Bearer k1x", 401),
        ("k1", 401),
        ("Basic k1", 401),
        ("Bearer ", 401),
        (None, 401),
    ],
)
async def test_keys(serve: Any, header: str | None, status: int) -> None:
    served = serve(api_keys=("k1", "k2"))
    headers = {} if header is None else {"Authorization": header}
    response = await served.client.post(COMPLETIONS, json=BODY, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["type"] == "AuthenticationError"
        assert response.headers["www-authenticate"] == "Bearer"


async def test_keys_guard_everything_but_probes(serve: Any) -> None:
    served = serve(api_keys=("k1",))
    for path in ("/health", "/ready", "/ping", "/version", "/metrics"):
        assert (await served.client.get(path)).status_code == 200
    for path in ("/v1/models", "/docs", "/openapi.json", "/load", "/nothing"):
        assert (await served.client.get(path)).status_code == 401
    assert (await served.client.post("/tokenize", json={"prompt": "x"})).status_code == 401


async def test_the_operators_routes_need_the_operators_key(serve: Any) -> None:
    served = serve(api_keys=("k1",), operations=OperationsArgs(admin_key="root"))
    expected = {None: 401, "k1": 403, "roo": 401, "root": 200}
    for key, status in expected.items():
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        for path in ("/server_info", "/v1/cache/prefixes"):
            assert (await served.client.get(path, headers=headers)).status_code == status
        answer = await served.client.post(COMPLETIONS, json=BODY, headers=headers)
        assert answer.status_code == (200 if key in ("k1", "root") else 401)
    only = serve(operations=OperationsArgs(admin_key="root"))
    assert (await only.client.post(COMPLETIONS, json=BODY)).status_code == 200
    assert (await only.client.post("/reset_prefix_cache")).status_code == 401
    headers = {"x-api-key": "root"}
    assert (await only.client.post("/reset_prefix_cache", headers=headers)).status_code == 200


async def test_phases_close_the_server(serve: Any) -> None:
    served = serve(ready=False)

    async def statuses() -> list[int]:
        paths = ("/health", "/ready", "/v1/models")
        return [(await served.client.get(path)).status_code for path in paths]

    assert await statuses() == [503, 503, 503]
    served.state.set_ready()
    assert await statuses() == [200, 200, 200]
    served.state.start_drain()
    assert await statuses() == [200, 503, 503]
    response = await served.client.post(COMPLETIONS, json=BODY)
    assert response.headers["retry-after"]
    served.state.set_dead("x")
    assert await statuses() == [503, 503, 503]


async def test_size(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_BODY_BYTES", 1000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    headers = {"Content-Type": "application/json"}
    for content in (b" " * 1001, chunks()):
        response = await served.client.post(COMPLETIONS, content=content, headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == 413


async def test_compressed_bodies_are_refused_by_name(served: Any) -> None:
    for encoding, status in (("gzip", 415), ("zstd", 415), ("Identity", 200)):
        headers = {"Content-Encoding": encoding}
        response = await served.client.post(COMPLETIONS, json=BODY, headers=headers)
        assert response.status_code == status
        assert (f"'Content-Encoding: {encoding}'" in response.text) == (status == 415)


async def test_cors(serve: Any) -> None:
    headers = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
    served = serve(allowed_origins=("http://a",), api_keys=("k",))
    preflight = await served.client.options(COMPLETIONS, headers=headers)
    assert preflight.status_code == 200
    refused = await served.client.post(COMPLETIONS, json=BODY, headers=headers)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://a"
    assert (await serve().client.options(COMPLETIONS, headers=headers)).status_code == 405


async def test_requests_are_counted_by_route(served: Any) -> None:
    await served.client.post(COMPLETIONS, json=BODY)
    await served.client.post(COMPLETIONS, json={})
    await served.client.get("/v1/models/tiny")
    await served.client.get("/secret/path")
    text = (await served.client.get("/metrics")).text
    for handler, method, status in (
        ("/v1/completions", "POST", "2xx"),
        ("/v1/completions", "POST", "4xx"),
        ("/v1/models/{model_id:path}", "GET", "2xx"),
        ("none", "GET", "4xx"),
    ):
        labels = f'{{handler="{handler}",method="{method}",status="{status}"}}'
        assert f"http_requests_total{labels} 1.0" in text
    assert "secret" not in text
    assert 'handler="/metrics"' not in text


async def test_no_request_stays_open(served: Any) -> None:
    for body in (BODY, {}, {**BODY, "stream": True}):
        await served.client.post(COMPLETIONS, json=body)
    assert served.state.num_open_requests == 0
    assert (await served.client.get("/load")).json() == {"server_load": 0}


async def test_scrapes_need_a_key_where_that_was_asked_for(serve: Any) -> None:
    served = serve(api_keys=("k1",), operations=OperationsArgs(guards_metrics=True))
    assert (await served.client.get("/metrics")).status_code == 401
    headers = {"Authorization": "Bearer k1"}
    assert (await served.client.get("/metrics", headers=headers)).status_code == 200
    assert (await served.client.get("/health")).status_code == 200


async def test_a_root_path_may_be_there_or_stripped(serve: Any) -> None:
    served = serve(api_keys=("k1",), operations=OperationsArgs(root_path="/llm"))
    headers = {"Authorization": "Bearer k1"}
    for path in ("/health", "/llm/health", "/llm/version"):
        assert (await served.client.get(path)).status_code == 200, path
    for path in ("/v1/models", "/llm/v1/models"):
        assert (await served.client.get(path)).status_code == 401, path
        assert (await served.client.get(path, headers=headers)).status_code == 200, path
    for path in ("/llmhealth", "/other/health"):
        assert (await served.client.get(path)).status_code == 401, path
    document = (await served.client.get("/openapi.json", headers=headers)).json()
    assert document["servers"] == [{"url": "/llm"}]


async def test_sizes_of_bodies(served: Any) -> None:
    response = await served.client.post(COMPLETIONS, json=BODY)
    text = (await served.client.get("/metrics")).text
    for name, size in (
        ("request", len(response.request.content)),
        ("response", len(response.content)),
    ):
        line = f'http_{name}_size_bytes_sum{{handler="{COMPLETIONS}"}} {float(size)}'
        assert line in text.splitlines()


async def test_a_request_id_is_echoed_or_made(served: Any) -> None:
    mine = await served.client.get("/version", headers={"X-Request-Id": "mine-1"})
    assert mine.headers["x-request-id"] == "mine-1"
    made = [(await served.client.get("/version")).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    forged = await served.client.get("/version", headers={"X-Request-Id": b"caf\xe9\x07"})
    assert forged.headers["x-request-id"].isalnum()


async def test_lines_of_a_request_carry_its_id(
    serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging()
    served = serve(enable_log_requests=True)
    await served.client.post(COMPLETIONS, json=BODY, headers={"X-Request-Id": "mine-2"})
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if "Received request" in line]
    assert " [mine-2] Received request cmpl-mine-2" in line


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/version"])
async def test_heads_of_what_can_be_got(serve: Any, path: str) -> None:
    served = serve()
    got, head = await served.client.get(path), await served.client.head(path)
    assert head.status_code == got.status_code == 200
    assert head.content == b""
    assert head.headers.get("content-type") == got.headers.get("content-type")
    assert (await served.client.head(COMPLETIONS)).status_code == 405


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/embed", "embeddings"),
        ("/v1/classify", "Classification"),
        ("/classify", "Classification"),
        ("/v1/audio/transcriptions", "Audio"),
        ("/v1/images/generations", "images"),
    ],
)
async def test_what_other_models_serve_is_named(serve: Any, path: str, what: str) -> None:
    answer = await serve().client.post(path, json={"input": "x"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["type"] == "NotFoundError"
    assert what in error["message"]
    assert "not served" in error["message"]


async def test_each_client_finds_the_message_where_it_looks(serve: Any) -> None:
    client = serve().client
    assert "query" in (await client.post("/v2/rerank", json={})).json()["message"]
    batches = (await client.post("/v1/messages/batches", json={})).json()
    assert batches["error"]["type"] == "not_found_error"
    assert "not served" in batches["error"]["message"]
    assert "no such route" in (await client.get("/v1/embed_dings")).json()["error"]["message"]


async def test_a_base_url_with_one_v1_too_many_or_too_few(serve: Any) -> None:
    client = serve().client
    openai = (await client.post("/chat/completions", json={})).json()["error"]
    assert openai["message"].endswith("adds no /v1, so give it the base URL with it.")
    anthropic = (await client.post("/v1/v1/messages", json={})).json()["error"]
    assert anthropic["message"].endswith("adds /v1 itself, so give it the base URL without it.")
    assert (await client.post("/messages", json={})).status_code == 404
    embeddings = (await client.post("/embeddings", json={})).json()["error"]
    assert "adds no /v1" in embeddings["message"]
