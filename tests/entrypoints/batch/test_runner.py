"""Running a batch against a server that is a function."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllm.entrypoints.batch.results import ResultFile
from vllm.entrypoints.batch.runner import BatchCounts, BatchRunner

Handler = Callable[[httpx.Request], Any]


def _write(path: Path, *names: str) -> None:
    rows = [{"custom_id": name, "url": "/v1/completions", "body": {"p": name}} for name in names]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


async def _run(folder: Path, handler: Handler, max_concurrency: int = 2) -> BatchCounts:
    transport = httpx.MockTransport(handler)
    async with httpx.AsyncClient(transport=transport, base_url="http://batch") as client:
        with ResultFile(folder / "out.jsonl") as results:
            runner = BatchRunner(client, results, max_concurrency, shows_progress=False)
            await runner.run(folder / "in.jsonl")
    return runner.counts


def _rows(folder: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


def _name(request: httpx.Request) -> str:
    return str(json.loads(request.content)["p"])


def _echo(request: httpx.Request) -> httpx.Response:
    headers = {"x-request-id": "id-" + _name(request)}
    return httpx.Response(200, json={"text": _name(request)}, headers=headers)


async def test_every_line_gets_its_result(tmp_path: Path) -> None:
    _write(tmp_path / "in.jsonl", "a", "b", "c")
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("nonsense\n")

    def handler(request: httpx.Request) -> httpx.Response:
        if _name(request) == "b":
            return httpx.Response(400, json={"error": {"message": "no"}})
        return httpx.Response(500, text="broken") if _name(request) == "c" else _echo(request)

    assert await _run(tmp_path, handler) == BatchCounts(1, 2, 1, 0)
    rows = _rows(tmp_path)
    assert rows["a"]["response"] == {
        "status_code": 200,
        "request_id": "id-a",
        "body": {"text": "a"},
    }
    assert rows["b"]["response"]["status_code"] == 400
    assert rows["c"]["response"]["body"] == "broken"
    assert rows[None]["error"]["message"].startswith("line 4: not JSON")  # type: ignore[index]
    assert rows[None]["response"] is None  # type: ignore[index]


async def test_a_second_run_does_what_has_not_succeeded(tmp_path: Path) -> None:
    _write(tmp_path / "in.jsonl", "a", "b", "c")
    first = await _run(
        tmp_path, lambda r: httpx.Response(400, json={}) if _name(r) == "b" else _echo(r)
    )
    assert (first.num_answered, first.num_failed) == (2, 1)
    kept = _rows(tmp_path)["a"]
    # As if the machine had stopped in the middle of a line.
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"custom_id": "c", "respon')
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(_name(request))
        return _echo(request)

    assert await _run(tmp_path, handler) == BatchCounts(1, 0, 0, 2)
    assert asked == ["b"]
    rows = _rows(tmp_path)
    assert rows["a"] == kept
    assert {row["response"]["status_code"] for row in rows.values()} == {200}


async def test_no_more_than_allowed_at_a_time_and_all_of_that(tmp_path: Path) -> None:
    _write(tmp_path / "in.jsonl", *(str(i) for i in range(10)))
    running = most = 0

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return _echo(request)

    assert (await _run(tmp_path, handler, max_concurrency=3)).num_answered == 10
    assert most == 3


async def test_a_full_server_is_asked_again(tmp_path: Path) -> None:
    _write(tmp_path / "in.jsonl", "a")
    answers = [httpx.Response(503, headers={"retry-after": "0"}), httpx.Response(200, json={})]
    assert (await _run(tmp_path, lambda _: answers.pop(0))).num_answered == 1
    assert answers == []


async def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path) -> None:
    _write(tmp_path / "in.jsonl", "a", "b")
    reached = asyncio.Event()

    async def handler(request: httpx.Request) -> httpx.Response:
        if _name(request) == "b":
            reached.set()
            await asyncio.Event().wait()
        return _echo(request)

    run = asyncio.create_task(_run(tmp_path, handler, max_concurrency=1))
    await reached.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert set(_rows(tmp_path)) == {"a"}


async def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n")
    assert await _run(tmp_path, _echo) == BatchCounts()
