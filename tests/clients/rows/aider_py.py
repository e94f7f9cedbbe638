"""aider: a file written by an edit block, and the message of its commit."""

import subprocess
import sys
import tempfile
from pathlib import Path

from client import SAID, WORKER, WORKER_KEY, WORKER_V1, Row, run

FLAGS = (
    *("--yes-always", "--no-pretty", "--no-check-update", "--no-show-release-notes"),
    *("--no-analytics", "--no-show-model-warnings", "--map-tokens", "0", "--edit-format", "diff"),
)


def edit(row: Row) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for command in (
            ["init", "-q"],
            ["config", "user.email", "a@b.c"],
            ["config", "user.name", "a"],
        ):
            subprocess.run(["git", *command], cwd=folder, check=True)
        program = [sys.executable, "-m", "aider", "--model", f"openai/{WORKER}", *FLAGS]
        keys = ["--openai-api-base", WORKER_V1, "--openai-api-key", WORKER_KEY]
        done = subprocess.run(
            [*program, *keys, "--message", "Write down what is found."],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
        )
        said = done.stdout + done.stderr
        assert (folder / "record.txt").is_file(), said[-2000:]
        assert (folder / "record.txt").read_text().strip() == SAID
        log = subprocess.run(
            ["git", "log", "-1", "--format=%s"], cwd=folder, capture_output=True, text=True
        ).stdout.strip()
        assert log == "docs: what is found", log
        row.shown = "an edit, a commit's message"


run({"an edit": edit}, "aider-chat")
