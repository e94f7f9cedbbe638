"""``skip_cache_insert`` and ``Cache-Control: no-store``, on every route."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.entrypoints.openai.conftest import Served

CHAT = [{"role": "user", "content": "The quick brown fox. " * 20}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The quick brown fox. " * 20},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": CHAT},
    "/v1/messages": {"messages": CHAT, "max_tokens": 5, "model": "tiny"},
}
NO_STORE = {"Cache-Control": "max-age=0, No-Store"}


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """An application with room."""
    return serve(served_model={"max_model_len": 2048})


@pytest.mark.parametrize("route", BODIES)
async def test_the_engine_is_told(served: Served, route: str) -> None:
    cases: list[tuple[dict[str, Any], dict[str, str], bool]] = [
        ({}, {}, False),
        ({}, {"Cache-Control": "no-cache"}, False),
        ({"skip_cache_insert": True}, {}, True),
        ({}, NO_STORE, True),
        ({"skip_cache_insert": False}, NO_STORE, False),
        ({"stream": True}, NO_STORE, True),
    ]
    for fields, headers, told in cases:
        answer = await served.client.post(route, json={**BODIES[route], **fields}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert served.engine.options[-1].skip_cache_insert is told
        assert "skip_cache_insert" not in answer.headers.get("x-ignored-fields", "")
    wrong = {**BODIES[route], "skip_cache_insert": "yes"}
    answer = await served.client.post(route, json=wrong)
    assert answer.status_code == 400
    assert "skip_cache_insert" in answer.text


async def test_nothing_is_written_stored_or_remembered(served: Served) -> None:
    body = {**BODIES["/v1/responses"], "prompt_cache_options": {"mode": "implicit"}}
    made = (await served.client.post("/v1/responses", json=body, headers=NO_STORE)).json()
    assert made["store"] is False
    assert made["usage"]["input_tokens_details"]["cache_write_tokens"] == 0
    assert (await served.client.get(f"/v1/responses/{made['id']}")).status_code == 404
    options = {"comparison_response_id": made["id"]}
    told = await served.client.post("/v1/responses", json={**body, "prompt_cache_options": options})
    kind = told.json()["prompt_cache_diagnostics"]["type"]
    assert kind == "comparison_response_not_found"
    asks = {**BODIES["/v1/messages"], "diagnostics": {"previous_message_id": None}}
    private = (await served.client.post("/v1/messages", json=asks, headers=NO_STORE)).json()
    assert private["usage"]["cache_creation_input_tokens"] == 0
    asks["diagnostics"] = {"previous_message_id": private["id"]}
    told = (await served.client.post("/v1/messages", json=asks)).json()
    reason = told["diagnostics"]["cache_miss_reason"]["type"]
    assert reason == "previous_message_not_found"


@pytest.mark.parametrize("keeps", ["store", "background"])
async def test_to_keep_the_response_is_a_contradiction(served: Served, keeps: str) -> None:
    body = {**BODIES["/v1/responses"], keeps: True, "skip_cache_insert": True}
    answer = await served.client.post("/v1/responses", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "skip_cache_insert"


async def test_chats_say_what_they_wrote(served: Served) -> None:
    route = "/v1/chat/completions"
    unit = served.context.config.cache_config.block_size
    told = []
    for num_cached, headers in ((0, {}), (10_000, {}), (0, NO_STORE)):
        served.engine.num_cached_tokens = num_cached
        reply = await served.client.post(route, json=BODIES[route], headers=headers)
        told.append(reply.json()["usage"]["prompt_tokens_details"]["cache_write_tokens"])
    assert told == [len(served.engine.jobs[0][0]) // unit * unit, 0, 0]
