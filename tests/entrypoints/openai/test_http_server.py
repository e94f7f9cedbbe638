"""Parts of the server's life that need no process; the rest is in tests/e2e."""

import asyncio
import json
import shlex
import subprocess
import sys
import threading

import pytest
from prometheus_client import CollectorRegistry

from vllm.entrypoints.openai.app import build_app, list_routes
from vllm.entrypoints.openai.http_server import _unless, curl_line, in_daemon_thread
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.entrypoints.openai.state import ServerState
from vllm.entrypoints.openai.web_server import make_uvicorn_config


def test_the_curl_line_can_be_pasted() -> None:
    words = shlex.split(curl_line("http://localhost:8000", needs_key=True))
    assert words[:2] == ["curl", "http://localhost:8000/v1/chat/completions"]
    assert json.loads(words[-1])["messages"]
    assert any("Authorization" in word for word in words)
    words = shlex.split(curl_line("http://localhost:8000", needs_key=False, has_chats=False))
    assert words[1] == "http://localhost:8000/v1/completions"
    assert json.loads(words[-1])["prompt"]
    assert "Authorization" not in curl_line("http://localhost:8000", needs_key=False)


def test_idle_connections_are_for_clients_and_proxies_to_close() -> None:
    config = make_uvicorn_config(lambda: None, ServerArgs(), close_timeout_s=1)
    # Longest first: nginx keeps them for 60 s, httpx for 5, Node's fetch for 4.
    assert config.timeout_keep_alive > 60


@pytest.mark.parametrize("developing", ["0", "1"])
def test_the_routes_that_are_logged_are_the_documents(
    developing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", developing)
    app = build_app(ServerState(), ServerArgs(), CollectorRegistry())
    documented = app.openapi()["paths"].items()
    expected = {path: sorted(map(str.upper, methods)) for path, methods in documented}
    assert list_routes(app) == expected
    assert ("/server_info" in expected) is (developing == "1")


async def test_blocking_work_in_a_thread() -> None:
    assert await in_daemon_thread(lambda: threading.current_thread().daemon)

    def fail() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        await in_daemon_thread(fail)


async def test_work_gives_way_to_a_stop() -> None:
    stop = asyncio.Event()
    assert await _unless(stop, asyncio.ensure_future(asyncio.sleep(0, "done"))) == "done"
    work = asyncio.ensure_future(asyncio.Event().wait())
    stop.set()
    assert await _unless(stop, work) is None
    with pytest.raises(asyncio.CancelledError):
        await work


@pytest.mark.slow
def test_the_server_process_loads_what_it_needs() -> None:
    code = (
        "import sys, vllm.entrypoints.openai.http_server, vllm.entrypoints.cli.main; "
        "print([m for m in ('torch', 'transformers', 'jinja2') if m in sys.modules]); "
        "print([m for m in sys.modules if m.startswith('vllm.') and "
        "any(part in m for part in ('gguf_config', 'mmproj', 'batch.wiring', 'cli.bench'))])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    # What only a GGUF file, its tower, --batch-dir or another command needs is not loaded either.
    assert result.stdout.split() == ["[]", "[]"]
