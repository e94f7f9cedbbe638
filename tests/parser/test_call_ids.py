"""Ids of calls in histories, as a family's prompts show them."""

import re
from typing import Any

import pytest

from vllm.parser.call_ids import with_own_ids


def chat(*ids: str) -> list[dict[str, Any]]:
    """One turn with a call and its result for each id."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    for call_id in ids:
        function = {"name": "f", "arguments": "{}"}
        call = {"id": call_id, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": "ok"})
    return messages


def ids_of(messages: Any) -> tuple[list[str], list[str]]:
    calls = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    results = [message["tool_call_id"] for message in messages if "tool_call_id" in message]
    return calls, results


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["call_ab12", "toolu_x"], ["functions.f:0", "functions.f:1"]),
        (["functions.f:0", "functions.f:1"], ["functions.f:0", "functions.f:1"]),
        (["functions.f:7", "call_ab12"], ["functions.f:7", "functions.f:1"]),
        (["functions.f:1", "call_ab12"], ["functions.f:1", "functions.f:2"]),
        (["f:0", "functions.f", "1", ""],
         ["functions.f:0", "functions.f:1", "functions.f:2", "functions.f:3"]),
        # A number that every answer begins anew is the model's own.
        (["functions.f:0", "functions.f:0"], ["functions.f:0", "functions.f:0"]),
    ],
)  # fmt: skip
def test_ids_of_other_models_become_kimis(given, shown):
    calls, results = ids_of(with_own_ids("kimi_k2", chat(*given)))
    assert calls == results == shown


@pytest.mark.parametrize("tools", ["mistral", "mistral_v11"])
def test_ids_of_other_models_become_mistrals(tools):
    given = ["call_ab12", "a1b2c3d4e", "functions.f:0", "call_ab13", "\ud83d"]
    calls, results = ids_of(with_own_ids(tools, chat(*given)))
    assert calls == results
    assert calls[1] == "a1b2c3d4e"
    assert len(set(calls)) == len(given)
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call_id) for call_id in calls)
    # In the next turn they are the same: the prefix cache finds them.
    again, _ = ids_of(with_own_ids(tools, chat(*given, "more")))
    assert again[: len(given)] == calls


@pytest.mark.parametrize("tools", ["hermes", "deepseek_v4", "none"])
def test_other_families_show_no_ids_of_their_own(tools):
    messages = chat("call_ab12")
    assert with_own_ids(tools, messages) is messages


@pytest.mark.parametrize(
    "message",
    [
        "x",
        {},
        {"tool_calls": "x"},
        {"tool_calls": ["x", {}, {"id": 5, "function": {"name": "f"}}, {"id": "a"}]},
        {"tool_call_id": 5},
        {"role": "tool", "tool_call_id": "unknown"},
    ],
)
def test_what_is_malformed_is_left_to_others(message):
    assert list(with_own_ids("kimi_k2", [message])) == [message]
