"""``vllm chat``, ``vllm complete`` and ``vllm run-batch`` as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server_process import ENVIRONMENT, ServerProcess


def _run(*arguments: str, text: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "vllm", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=ENVIRONMENT,
    )


@pytest.mark.parametrize("command", ["chat", "complete"])
@pytest.mark.parametrize("platform", ["cpu"], indirect=True)
def test_clients_of_a_server(server: ServerProcess, command: str) -> None:
    url = ["--url", server.url + "/v1"]
    length = ["--max-tokens", "4"] if command == "complete" else []
    quick = _run(command, *url, *length, "-q", "The access code of Mira is 4827.", "--stats")
    assert quick.returncode == 0, quick.stderr
    assert "generated]" in quick.stderr
    spoken = _run(command, *url, *length, text="Hello\nThe garden\n")
    assert spoken.returncode == 0, spoken.stderr
    assert "Using model: deepseek-v4" in spoken.stderr
    assert spoken.stdout.count("\n") >= 2


def test_a_batch_is_finished_by_a_second_run(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    completion = {"prompt": "The garden", "max_tokens": 3}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    rows: list[dict[str, Any]] = [
        {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": completion},
        {"custom_id": "2", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "3", "method": "POST", "url": "/v1/completions", "body": {"prompt": 3.5}},
    ]
    flags = ["run-batch", "-i", str(source), "-o", str(target), "--block-size", "32"]

    def run() -> tuple[int, dict[str, Any]]:
        source.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no request\n")
        result = _run(*flags, "--disable-progress-bar")
        lines = [json.loads(line) for line in target.read_text().splitlines()]
        assert "Traceback" not in result.stderr
        return result.returncode, {row["custom_id"]: row for row in lines}

    code, first = run()
    assert code == 1
    assert first["1"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert first["2"]["response"]["body"]["object"] == "chat.completion"
    assert first["3"]["response"]["status_code"] == 400
    assert "line 4" in first[None]["error"]["message"]  # type: ignore[index]
    rows[2]["body"] = completion
    _, second = run()
    assert [second[name]["response"]["status_code"] for name in "123"] == [200, 200, 200]
    assert (second["1"], second["2"]) == (first["1"], first["2"])
