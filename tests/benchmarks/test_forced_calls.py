"""What counts as a right answer where a call must come."""

import random
from typing import Any

import pytest

from benchmarks.real_weights.forced_calls import TOOLS, draw_request, find_fault

_TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]
_NAMED = {"type": "function", "function": {"name": "now"}}
_ADD = {"name": "add", "arguments": '{"a": 1, "b": 2.5}'}
_NOW = {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "reason", "calls", "fault"),
    [
        ({"tool_choice": "required"}, "tool_calls", [_ADD, _NOW], ""),
        ({"tool_choice": "required"}, "length", [_ADD], "length"),
        ({"tool_choice": _NAMED}, "tool_calls", [_NOW], ""),
        ({"tool_choice": _NAMED}, "tool_calls", [_ADD], "called 'add'"),
        ({"tool_choice": _NAMED}, "tool_calls", [_NOW, _NOW], "2 calls"),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            "tool_calls",
            [_ADD, _NOW],
            "2 calls",
        ),
        (
            {"tool_choice": "required"},
            "tool_calls",
            [{"name": "add", "arguments": '{"a": 1}'}],
            "'b' is a required",
        ),
        ({"tool_choice": "required"}, "tool_calls", [{**_ADD, "name": "route"}], "called 'route'"),
    ],
)
def test_faults(fields: dict[str, Any], reason: str, calls: list[Any], fault: str) -> None:
    found = find_fault({"tools": _TOOLS, **fields}, reason, calls)
    assert (fault in found) if fault else (found == "")


def test_requests_are_of_every_kind() -> None:
    drawn = [draw_request(random.Random(seed)) for seed in range(100)]
    assert {request["stream"] for request in drawn} == {True, False}
    assert {isinstance(request["tool_choice"], dict) for request in drawn} == {True, False}
    assert {request.get("parallel_tool_calls") for request in drawn} == {None, False}
    called = {tool["function"]["name"] for request in drawn for tool in request["tools"]}
    assert called == set(TOOLS)
