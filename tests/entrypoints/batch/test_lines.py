"""Lines of a batch."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm.entrypoints.batch.lines import BadLine, BatchRequest, count_lines, read_lines

GOOD: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "x"},
}


def _read(tmp_path: Path, *lines: str | bytes) -> list[BatchRequest | BadLine]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    read = list(read_lines(path))
    assert len(read) == count_lines(path)
    return read


def test_good_lines(tmp_path: Path) -> None:
    other = {**GOOD, "custom_id": "b", "url": "/v1/responses", "extra": 1}
    del other["method"]
    assert _read(tmp_path, json.dumps(GOOD), "", "  ", json.dumps(other), "") == [
        BatchRequest(1, "a", "/v1/completions", {"prompt": "x"}),
        BatchRequest(4, "b", "/v1/responses", {"prompt": "x"}),
    ]


@pytest.mark.parametrize(
    ("line", "custom_id", "reason"),
    [
        ("{", None, "not JSON"),
        (b'{"custom_id": "\xff"}', None, "not JSON"),
        ("[" * 200_000, None, "not JSON"),
        ("[]", None, "not an object"),
        ("{}", None, "custom_id"),
        ({**GOOD, "custom_id": ""}, None, "custom_id"),
        ({**GOOD, "custom_id": 7}, None, "custom_id"),
        ({**GOOD, "method": "GET"}, "a", "'GET'"),
        ({**GOOD, "url": "http://elsewhere/v1/x"}, "a", "url"),
        ({**GOOD, "url": None}, "a", "url"),
        ({**GOOD, "body": []}, "a", "body"),
        ({**GOOD, "body": {"stream": True}}, "a", "stream"),
        ({**GOOD, "body": {"background": True}}, "a", "background"),
    ],
)
def test_bad_lines_say_why(
    tmp_path: Path, line: str | bytes | dict[str, Any], custom_id: str | None, reason: str
) -> None:
    raw = json.dumps(line) if isinstance(line, dict) else line
    after = json.dumps({**GOOD, "custom_id": "next"})
    bad, good = _read(tmp_path, raw, after)
    assert isinstance(bad, BadLine)
    assert (bad.number, bad.custom_id) == (1, custom_id)
    assert reason in bad.reason
    assert isinstance(good, BatchRequest)


def test_a_name_used_twice(tmp_path: Path) -> None:
    first, second = _read(tmp_path, json.dumps(GOOD), json.dumps(GOOD))
    assert isinstance(first, BatchRequest)
    assert isinstance(second, BadLine)
    assert "line 1" in second.reason
