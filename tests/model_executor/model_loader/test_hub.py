"""Hub ids through huggingface_hub itself, against a hub of one repository on this machine."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from vllm.model_executor.model_loader import resolve

pytestmark = pytest.mark.slow

COMMITS = {"main": "a" * 40, "v2": "b" * 40}
ROOT = Path(resolve.__file__).parents[3]
CODE = """
import sys
from vllm.v1.engine.engine_args import EngineArgs
from vllm.exceptions import ConfigError
try:
    print(EngineArgs(**eval(sys.argv[1])).create_vllm_config().model_config.path)
except ConfigError as error:
    print("refused:", error)
"""


def files_of(revision: str) -> dict[str, bytes]:
    embedded = Path(resolve.resolve_checkpoint("deepseek-v4").path)
    config = json.loads((embedded / "config.json").read_text())
    return {
        "config.json": json.dumps(config | {"vllm_note": revision}).encode(),
        "model.safetensors": b"weights of " + revision.encode(),
        "pytorch_model.bin": b"not wanted",
    }


def revision_of(commit: str) -> str:
    return next(name for name, sha in COMMITS.items() if sha == commit)


class Hub(BaseHTTPRequestHandler):
    """Answers what snapshot_download asks."""

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        if match := re.fullmatch(r"/api/models/owner/name/revision/([\w.]+)", path):
            revision = match[1]
            if revision in COMMITS:
                siblings = [{"rfilename": name} for name in files_of(revision)]
                body = {"id": "owner/name", "sha": COMMITS[revision], "siblings": siblings}
                return self.send(json.dumps(body).encode(), "application/json", with_body)
        if match := re.fullmatch(r"/api/models/owner/name/tree/(\w+)", path):
            files = files_of(revision_of(match[1]))
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": match[1]}
                for name, content in files.items()
            ]
            return self.send(json.dumps(tree).encode(), "application/json", with_body)
        if match := re.fullmatch(r"/owner/name/resolve/(\w+)/([\w.]+)", path):
            content = files_of(revision_of(match[1]))[match[2]]
            return self.send(content, "application/octet-stream", with_body, match[1])
        self.send_response(404)
        self.send_header("X-Error-Code", "RevisionNotFound" if "/name/" in path else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def send(self, body: bytes, kind: str, with_body: bool, commit: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if commit:
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{commit}{len(body)}"')
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(home: Path, hub: str, *, offline: bool = False, **fields: str) -> str:
    """Resolves a configuration in a process of its own, as huggingface_hub reads variables once."""
    environment = os.environ | {"HF_HOME": str(home), "HF_ENDPOINT": hub}
    environment["HF_HUB_OFFLINE"] = str(int(offline))
    for name in ("HF_HUB_CACHE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", CODE, repr(fields)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=ROOT,
    )
    return done.stdout.strip().splitlines()[-1]


def note_of(folder: str) -> str:
    return json.loads(Path(folder, "config.json").read_text())["vllm_note"]


def test_a_hub_id_is_downloaded_once_and_found_offline(tmp_path: Path, hub: str) -> None:
    first = ask(tmp_path, hub, model="owner/name")
    assert note_of(first) == "main"
    assert {file.name for file in Path(first).iterdir()} == {"config.json", "model.safetensors"}
    assert ask(tmp_path, "http://127.0.0.1:9", offline=True, model="owner/name") == first


def test_a_revision_is_another_snapshot(tmp_path: Path, hub: str) -> None:
    found = ask(tmp_path, hub, model="owner/name", revision="v2")
    assert note_of(found) == "v2"
    assert COMMITS["v2"] in found
    refusal = ask(tmp_path, hub, model="owner/name", revision="v3")
    assert refusal.startswith("refused: model='owner/name' at revision 'v3'")


def test_a_download_dir_holds_the_snapshots(tmp_path: Path, hub: str) -> None:
    kept = tmp_path / "kept" / "here"
    found = ask(tmp_path / "home", hub, model="owner/name", download_dir=str(kept))
    assert Path(found).is_relative_to(kept)
    again = ask(tmp_path / "home", hub, offline=True, model="owner/name", download_dir=str(kept))
    assert again == found
    elsewhere = ask(tmp_path / "home", hub, offline=True, model="owner/name")
    assert "HF_HUB_OFFLINE forbids a download" in elsewhere


def test_without_a_network_the_refusal_says_what_to_do(tmp_path: Path) -> None:
    refusal = ask(tmp_path, "http://127.0.0.1:9", model="owner/name")
    assert refusal.startswith("refused: model='owner/name'")
    assert "Give a folder" in refusal


def test_a_repository_that_is_not_there(tmp_path: Path, hub: str) -> None:
    assert "refused: model='owner/other'" in ask(tmp_path, hub, model="owner/other")


@pytest.mark.parametrize("model", ["deepseek-v4", "."])
def test_revisions_are_of_hub_ids_only(tmp_path: Path, hub: str, model: str) -> None:
    assert "revision='v2' chooses a revision of a hub id" in ask(
        tmp_path, hub, model=model, revision="v2"
    )


def test_a_download_dir_that_cannot_be_made(tmp_path: Path, hub: str) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "folder")
    assert f"download_dir={folder!r} cannot be made" in ask(
        tmp_path, hub, model="owner/name", download_dir=folder
    )
