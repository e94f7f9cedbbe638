"""promptfoo: an evaluation whose answers are asserted, by chats and by vectors."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from client import MODEL, SAID, V1, WORKER, WORKER_KEY, WORKER_V1, Row, run

ENVS = Path(os.environ.get("CLIENTS_ENVS", ".venv-clients")) / "promptfoo"
BIN = ENVS / "node_modules" / ".bin"
MANIFEST = ENVS / "node_modules" / "promptfoo" / "package.json"
_TIMEOUT_S = 300


def _evaluate(config: dict[str, Any]) -> dict[str, Any]:
    """Return what an evaluation tells; nothing of it leaves this machine."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(config))
        quiet = ("PROMPTFOO_DISABLE_TELEMETRY", "PROMPTFOO_DISABLE_UPDATE")
        subprocess.run(
            [
                *(str(BIN / "node"), str(BIN / "promptfoo"), "eval", "--no-cache"),
                *("-c", str(folder / "config.json"), "-o", str(folder / "out.json")),
            ],
            cwd=folder,
            env={**os.environ, "PROMPTFOO_CONFIG_DIR": made, **dict.fromkeys(quiet, "1")},
            stdout=2,
            timeout=_TIMEOUT_S,
            check=False,
        )
        told: dict[str, Any] = json.loads((folder / "out.json").read_text())
        return told


def _check(row: Row, config: dict[str, Any]) -> None:
    results = _evaluate(config)["results"]
    stats = results["stats"]
    failures = [one.get("error") for one in results["results"] if not one["success"]]
    assert not failures, failures
    assert stats["successes"] == len(config["tests"]), stats
    row.shown = f"{stats['successes']} tests"


def chat(row: Row) -> None:
    provider = {
        "id": f"openai:chat:{WORKER}",
        "config": {"apiBaseUrl": WORKER_V1, "apiKey": WORKER_KEY},
    }
    asserted = [{"type": "contains", "value": SAID}]
    tests = [{"vars": {"record": str(i)}, "assert": asserted} for i in range(3)]
    _check(row, {"prompts": ["Find {{record}}."], "providers": [provider], "tests": tests})


def embeddings(row: Row) -> None:
    """A provider of vectors answers whoever asks how alike two texts are."""
    settings = {"apiBaseUrl": V1, "apiKey": "none"}
    made = subprocess.run(
        [
            str(BIN / "node"),
            "--input-type=module",
            "-e",
            "const p = (await import('promptfoo')).default;"
            f"const a = await p.loadApiProvider('openai:embedding:{MODEL}',"
            f" {{options: {{config: {json.dumps(settings)}}}}});"
            "const r = await a.callEmbeddingApi('One two');"
            "console.log(JSON.stringify({n: r.embedding?.length, error: r.error}));"
            "process.exit(0);",
        ],
        cwd=ENVS,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    told = json.loads(made.stdout.strip().splitlines()[-1])
    assert told["n"], (told, made.stderr[-300:])
    row.shown = f"{told['n']} dimensions"


run(
    {"eval, chat": chat, "embeddings": embeddings},
    "promptfoo (npm)",
    json.loads(MANIFEST.read_text())["version"],
)
