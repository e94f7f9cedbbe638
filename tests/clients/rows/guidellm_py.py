"""guidellm: a load of streamed chats and completions, as texts made of the model's own tokens."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from client import MODEL, URL, Row, run

REQUESTS = 8


def _load(row: Row, path: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        told_at = Path(made) / "told.json"
        tokenizer = os.environ["CLIENTS_TOKENIZER"]
        backend = f"kind=openai_http,target={URL},model={MODEL},request_format={path}"
        done = subprocess.run(
            [
                *(str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"),
                *("--backend", backend),
                *("--profile", "kind=concurrent,streams=2"),
                *("--constraint", f"kind=max_requests,count={REQUESTS}"),
                *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
                *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=12"),
                *("--output", f"kind=json,path={told_at}"),
            ],
            capture_output=True,
            text=True,
            timeout=300,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said[-2000:]
        told: dict[str, Any] = json.loads(told_at.read_text("utf-8"))
    totals = told["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == REQUESTS, totals
    row.shown = f"{totals['successful']} requests"


run(
    {
        "chat, streamed": lambda row: _load(row, "/v1/chat/completions"),
        "completions, streamed": lambda row: _load(row, "/v1/completions"),
    },
    "guidellm",
)
