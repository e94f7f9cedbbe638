"""A batch's input: what is wrong with it, and the order in which its lines are sent."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from vllm.entrypoints.batch import validation
from vllm.entrypoints.batch.prefix_order import prefix_key
from vllm.entrypoints.batch.validation import Plan, plan_batch, read_line

CHATS = "/v1/chat/completions"


def line(custom_id: str, text: str = "Hi", **change: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHATS, "body": body, **change}


def plan(tmp_path: Path, *lines: Any) -> Plan:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    return plan_batch(path, CHATS)


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        (line(""), "custom_id"),
        (line("a"), "stands in line 1 already"),
        (line("b", method="GET"), "method"),
        (line("b", url="/v1/completions"), "is not the batch's endpoint"),
        (line("b", body=[]), "body must be an object"),
        (line("b", body={"model": "m", "stream": True}), "stream"),
        (line("b", body={"model": "other"}), "model differs"),
    ],
)
def test_one_wrong_line_fails_the_batch_and_is_named(
    tmp_path: Path, wrong: Any, fault: str
) -> None:
    found = plan(tmp_path, line("a"), "", wrong)
    assert found.lines == ()
    (error,) = found.errors
    assert error.line == 3
    assert fault in error.message


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [error.code for error in plan(tmp_path, "", " ").errors] == ["empty_file"]
    monkeypatch.setattr(validation, "MAX_LINES", 2)
    assert plan(tmp_path, line("a"), line("b")).errors == ()
    found = plan(tmp_path, line("a"), line("b"), line("c"))
    assert [error.code for error in found.errors] == ["too_many_lines"]
    monkeypatch.setattr(validation, "MAX_FILE_BYTES", 10)
    assert [error.code for error in plan(tmp_path, line("a")).errors] == ["file_too_large"]
    monkeypatch.setattr(validation, "MAX_LINES", 1000)
    monkeypatch.setattr(validation, "MAX_FILE_BYTES", 10**6)
    assert len(plan(tmp_path, *["{"] * 200).errors) == 100


def test_lines_that_begin_alike_follow_each_other(tmp_path: Path) -> None:
    systems = [f"You are helper {i}. " + "Rules follow. " * 40 for i in range(4)]
    lines = []
    for i in range(24):
        messages = [
            {"role": "system", "content": systems[i % 4]},
            {"role": "user", "content": f"Question {i} of many, quite different"},
        ]
        lines.append(line(f"id{i}", body={"model": "m", "messages": messages}))
    found = plan(tmp_path, *lines)
    path = tmp_path / "in.jsonl"
    order = [read_line(path, planned) for planned in found.lines]
    assert sorted(request.custom_id for request in order) == sorted(
        one["custom_id"] for one in lines
    )
    kinds = [request.body["messages"][0]["content"] for request in order]
    changes = sum(a != b for a, b in itertools.pairwise(kinds))
    assert changes == 3
    assert found.model == "m"


def test_keys_are_small_and_begin_alike() -> None:
    one = {"messages": [{"role": "user", "content": "x" * 100_000 + "a"}]}
    other = {"messages": [{"role": "user", "content": "x" * 600 + "b"}]}
    keys = prefix_key(one), prefix_key(other)
    assert keys[0][:12] == keys[1][:12]
    assert keys[0] != keys[1]
    assert max(map(len, keys)) < 500
    # Tools stand in front of the messages in a prompt, whatever the body's order.
    assert prefix_key({"messages": [], "tools": [1]}) == prefix_key({"tools": [1], "messages": []})
    assert prefix_key({"prompt": "a"}) != prefix_key({"prompt": "a", "cache_salt": "s"})
