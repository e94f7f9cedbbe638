"""aiperf: a load of streamed chats and completions, counted by the server and by the client."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from client import MODEL, URL, Row, run

REQUESTS = 8
FLAGS = (
    *("--model", MODEL, "--url", URL, "--streaming", "--ui", "none"),
    *("--tokenizer", os.environ["CLIENTS_TOKENIZER"], "--request-count", str(REQUESTS)),
    *("--concurrency", "4", "--isl", "64", "--osl", "12"),
)


def _load(row: Row, endpoint: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        program = [str(Path(sys.executable).parent / "aiperf"), "profile", *FLAGS]
        done = subprocess.run(
            [*program, "--endpoint-type", endpoint, "--artifact-dir", made],
            capture_output=True,
            text=True,
            timeout=300,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said[-2000:]
        (file,) = Path(made).rglob("profile_export_aiperf.json")
        told: dict[str, Any] = json.loads(file.read_text("utf-8"))
    assert told["request_count"]["avg"] == REQUESTS, told["request_count"]
    assert not told.get("error_summary"), told["error_summary"]
    assert told["time_to_first_token"]["avg"] > 0
    row.shown = f"{REQUESTS} requests, output {told['output_sequence_length']['avg']:.0f} tokens"


run(
    {
        "chat, streamed": lambda row: _load(row, "chat"),
        "completions, streamed": lambda row: _load(row, "completions"),
    },
    "aiperf",
)
