"""``/cache`` of a real server: what it streams, and what a real browser makes of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.chromium import PROGRAM, Chromium
from tests.e2e.server_process import ServerProcess

_KEY = "k-1"
_AUTH = {"Authorization": f"Bearer {_KEY}"}
_PROMPT = list(range(100, 400))


@pytest.fixture(scope="module")
def dev_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server in development mode, behind a key."""
    folder = tmp_path_factory.mktemp("page")
    flags = ("--api-key", _KEY, "--cache-trace", str(folder / "trace.jsonl"))
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    with ServerProcess(folder / "log.txt", *flags, environment=environment) as server:
        for name, more in (("first", 1), ("second", 2)):
            _complete(server, [*_PROMPT, *[more] * 64], f"{name}<b>&")
        yield server


def _complete(server: ServerProcess, prompt: list[int], name: str) -> None:
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    headers = {**_AUTH, "X-Request-Id": name}
    response = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text


def _snapshots(server: ServerProcess) -> Iterator[dict[str, Any]]:
    with httpx.stream("GET", f"{server.url}/cache/events", headers=_AUTH, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def test_the_stream_shows_what_happened(dev_server: ServerProcess) -> None:
    events = _snapshots(dev_server)
    view = next(events)
    assert view["totals"]["requests"] >= 2
    stem = view["tree"]["branches"][0]
    assert (stem["begin"], stem["end"]) == (0, 288)
    assert {b["begin"] for b in view["tree"]["branches"][1:]} >= {288}
    assert any(tick["at"] == 288 for tick in stem["ticks"])
    assert view["admissions"][-2]["request_id"] == "cmpl-second<b>&"
    assert sum(view["tiers"].values()) == view["num_blocks"]
    before = view["totals"]["cached_tokens"]
    _complete(dev_server, [*_PROMPT, *[1] * 64], "third")
    # The next look may have been under way already.
    later = (next(events)["totals"]["cached_tokens"] for _ in range(5))
    assert any(cached > before for cached in later)
    events.close()


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium: apt-get install chromium")
def test_a_browser_shows_it(dev_server: ServerProcess, tmp_path: Path) -> None:
    with Chromium(tmp_path) as browser:
        browser.open(f"{dev_server.url}/cache")
        browser.wait_for(
            "document.querySelector('#gate') && !document.querySelector('#gate').hidden"
        )
        _enter_key(browser, "wrong")
        browser.wait_for("document.querySelector('#gate-note').textContent.includes('not valid')")
        browser.errors.clear()  # the refused requests
        _enter_key(browser, _KEY)
        browser.wait_for("document.querySelectorAll('svg .branch').length >= 3")
        names = browser.evaluate("document.querySelector('#rows').textContent")
        assert "cmpl-second<b>&" in names
        assert browser.evaluate("document.querySelectorAll('#rows b').length") == 0
        browser.evaluate(
            "document.querySelector('svg .branch').dispatchEvent(new MouseEvent('click'))"
        )
        assert "0 – 288" in browser.evaluate("document.querySelector('#detail').textContent")
        _complete(dev_server, list(range(500, 700)), "fourth")
        browser.wait_for("document.querySelector('#rows').textContent.includes('cmpl-fourth')")
        browser.evaluate("document.querySelector('#rows button').click()")
        browser.wait_for("document.querySelector('#why').textContent.includes('first_seen')")
        assert browser.errors == []


def _enter_key(browser: Chromium, key: str) -> None:
    browser.evaluate(
        f"document.querySelector('#key').value = {json.dumps(key)};"
        "document.querySelector('#gate button').click()"
    )
