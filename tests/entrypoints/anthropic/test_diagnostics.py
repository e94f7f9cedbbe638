"""``diagnostics`` of the Messages API."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.entrypoints.anthropic.test_serving import ADAPTIVE, LOOK, URL, create, events_in
from tests.entrypoints.openai.conftest import Served

LONG = "The quick brown fox jumps over the lazy dog. " * 8
SAID = [
    {"role": "user", "content": LONG},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And?"},
]
PLAIN: dict[str, Any] = {"system": "Be kind.", "tools": [LOOK], "messages": SAID}
SECOND = {**LOOK, "name": "second"}


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """An application with room for tools."""
    return serve(served_model={"max_model_len": 4096}, enable_prompt_tokens_details=True)


async def ask(served: Served, previous: str | None, **body: Any) -> Any:
    return await create(
        served, **{**PLAIN, "diagnostics": {"previous_message_id": previous}, **body}
    )


@pytest.mark.parametrize(
    ("first", "change", "told", "component"),
    [
        ({}, {}, None, None),
        ({}, {"messages": [*SAID, {"role": "assistant", "content": "a"}, SAID[0]]}, None, None),
        ({}, {"messages": [*SAID, {"role": "user", "content": "More."}]}, None, None),
        ({}, {"messages": SAID[:1]}, None, None),
        ({}, {"system": "Be rude."}, "system_changed", "system"),
        ({"tools": [LOOK, SECOND]}, {"tools": [SECOND, LOOK]}, "tools_changed", "tools"),
        (
            {},
            {"messages": [SAID[0], {**SAID[1], "content": "No."}, SAID[2]]},
            "messages_changed",
            1,
        ),
        ({}, {"model": "alias"}, "model_changed", "model"),
        ({}, {"thinking": ADAPTIVE}, "unavailable", "chat_template_kwargs"),
        ({}, {"tool_choice": {"type": "any"}}, "unavailable", "tool_choice"),
        (
            {
                "system": [
                    {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
                ]
            },
            {},
            None,
            None,
        ),
    ],
)
async def test_where_a_prompt_parted(
    served: Served, first: dict[str, Any], change: dict[str, Any], told: str | None, component: Any
) -> None:
    before = await ask(served, None, **first)
    assert before.diagnostics is None
    after = (await ask(served, before.id, **{**first, **change})).diagnostics
    if told is None:
        assert after is None
        return
    assert after.cache_miss_reason.type == told
    place = after.model_extra["first_difference"]
    expected = ("messages", component) if type(component) is int else (component, None)
    assert (place["component"], place["message_index"]) == expected
    if told != "unavailable":
        unit = served.context.config.cache_config.block_size
        missed = len(served.engine.jobs[-1][0]) - place["token_offset"] // unit * unit
        assert after.cache_miss_reason.cache_missed_input_tokens == missed


async def test_who_did_not_opt_in_is_not_found(served: Served) -> None:
    silent = await create(served, **PLAIN)
    for name in (silent.id, "msg_1"):
        told = (await ask(served, name)).diagnostics
        assert told.cache_miss_reason.type == "previous_message_not_found"


async def test_a_stream_begins_with_it(served: Served) -> None:
    before = await ask(served, None)
    body = {**PLAIN, "system": "Be rude.", "diagnostics": {"previous_message_id": before.id}}
    reply = await served.client.post(
        URL, json={"model": "tiny", "max_tokens": 2, "stream": True, **body}
    )
    assert reply.headers["cache-status"].startswith('vllm; fwd=miss; detail="0 of ')
    (start, *_) = events_in(reply)
    assert start.type == "message_start"
    assert start.message.diagnostics.cache_miss_reason.type == "system_changed"


@pytest.mark.parametrize("wrong", ["x", 5, {"previous_message_id": 5}, {"previous_message_id": ""}])
async def test_malformed_diagnostics_are_refused(served: Served, wrong: Any) -> None:
    body = {"model": "tiny", "max_tokens": 2, "messages": SAID, "diagnostics": wrong}
    reply = await served.client.post(URL, json=body)
    assert reply.status_code == 400
    assert "diagnostics" in reply.json()["error"]["message"]


async def test_what_was_written_is_told_by_its_lifetime(served: Served) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": LONG, "cache_control": mark}]
    usage = (await create(served, system=system, messages=SAID)).usage
    created = usage.cache_creation
    assert created.ephemeral_1h_input_tokens > 50
    assert created.ephemeral_5m_input_tokens > 50
    total = created.ephemeral_1h_input_tokens + created.ephemeral_5m_input_tokens
    assert total == usage.cache_creation_input_tokens
