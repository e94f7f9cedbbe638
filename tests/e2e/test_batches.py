"""A batch on a real server that is killed in the middle, and chats beside it."""

import json
import os
import signal
import time
from pathlib import Path

import openai

from tests.e2e.server_process import NO_TLS, ServerProcess

NUM_LINES = 24


def make_line(i: int) -> bytes:
    messages = [
        {"role": "system", "content": f"You are helper {i % 3}. " + "Answer in a word. " * 12},
        {"role": "user", "content": f"What is {i}?"},
    ]
    body = {"model": "deepseek-v4", "messages": messages, "max_tokens": 12, "temperature": 0}
    row = {"custom_id": f"line-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(row).encode() + b"\n"


def make_client(server: ServerProcess) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(verify=NO_TLS)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http)


def test_kill_9_loses_and_repeats_no_line(tmp_path: Path) -> None:
    flags = ("--batch-dir", str(tmp_path / "batches"), "--batch-max-concurrency", "2")
    # What was begun behind several API processes is finished behind one.
    several = (*flags, "--api-server-count", "2")
    with ServerProcess(tmp_path / "log1", *several) as server, make_client(server) as client:
        content = b"".join(map(make_line, range(NUM_LINES)))
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while True:
            batch = client.batches.retrieve(batch.id)
            assert batch.request_counts is not None
            if batch.request_counts.completed >= 3:
                break
            time.sleep(0.02)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    assert batch.request_counts.completed < NUM_LINES
    with ServerProcess(tmp_path / "log2", *flags) as server, make_client(server) as client:
        # A chat is answered meanwhile.
        chat = client.chat.completions.create(
            model="deepseek-v4", messages=[{"role": "user", "content": "Hi"}], max_tokens=4
        )
        assert chat.usage is not None
        deadline = time.monotonic() + 120
        while batch.status != "completed":
            assert time.monotonic() < deadline, batch
            batch = client.batches.retrieve(batch.id)
            time.sleep(0.05)
        assert batch.output_file_id is not None
        rows = client.files.content(batch.output_file_id).text.splitlines()
        names = [json.loads(row)["custom_id"] for row in rows]
        assert sorted(names) == sorted(f"line-{i}" for i in range(NUM_LINES))
        # Lines of one system text follow each other, so all but a few hit it.
        assert batch.usage is not None
        assert batch.usage.input_tokens_details.cached_tokens > batch.usage.input_tokens / 3
