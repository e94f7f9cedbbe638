"""``/`` and ``/cache`` of a real server: what they stream, and what a real browser makes of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.chromium import PROGRAM, Chromium
from tests.e2e.server_process import ServerProcess
from tests.entrypoints.image_fixtures import base64_of, picture
from tests.entrypoints.test_llm_images import write_seeing

_KEY = "k-1"
_AUTH = {"Authorization": f"Bearer {_KEY}"}
_PROMPT = list(range(100, 400))
_STORY = "The garden is quiet. It rained all day. " * 30


@pytest.fixture(scope="module")
def dev_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server in development mode, behind a key."""
    folder = tmp_path_factory.mktemp("page")
    flags = ("--api-key", _KEY, "--cache-trace", str(folder / "trace.jsonl"))
    flags += ("--enable-prompt-tokens-details",)
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
    assert sum(span["prompt_tokens"] for span in view["history"]) == view["totals"]["prompt_tokens"]
    before = view["totals"]["cached_tokens"]
    _complete(dev_server, [*_PROMPT, *[1] * 64], "third")
    # The next look may have been under way already.
    later = (next(events)["totals"]["cached_tokens"] for _ in range(5))
    assert any(cached > before for cached in later)
    events.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    if PROGRAM is None:
        pytest.skip("no Chromium: apt-get install chromium-headless-shell")
    with Chromium(tmp_path) as made:
        yield made


def _open(browser: Chromium, url: str) -> None:
    browser.open(url)
    browser.wait_for("document.querySelector('#gate') && !document.querySelector('#gate').hidden")
    browser.type("#key", _KEY, enter=True)
    browser.wait_for("!document.querySelector('#all').hidden")


def test_a_chat_shows_what_each_turn_hit(dev_server: ServerProcess, browser: Chromium) -> None:
    _open(browser, f"{dev_server.url}/")
    browser.wait_for("document.querySelector('#model').value")
    browser.evaluate(
        "for (const [id, value] of [['#max-tokens', 12], ['#temperature', 0],"
        f" ['#system', {json.dumps(_STORY)}]]) {{ const f = document.querySelector(id);"
        " f.value = value; f.dispatchEvent(new Event('input')); }"
    )
    for turn, text in enumerate(("What is <b>quiet</b>?", "And then?")):
        browser.type("#ask", text, enter=True)
        browser.wait_for(
            "document.querySelector('#stop').hidden && "
            f"document.querySelectorAll('.turn.assistant').length == {turn + 1}"
        )
    # The second turn hits what the first one left, and says why it computed the rest.
    hits = "document.querySelectorAll('.turn.assistant')[1].querySelectorAll('.prompt .hit')"
    assert browser.evaluate(f"{hits}.length") == 1
    browser.evaluate(
        "document.querySelectorAll('.turn.assistant')[1].querySelector('.computed').focus()"
    )
    because = (
        "document.querySelectorAll('.turn.assistant')[1].querySelector('.because').textContent"
    )
    assert "computed: behind the last place" in browser.evaluate(because)
    # What is typed stays text.
    assert browser.evaluate("document.querySelectorAll('.turn.user b').length") == 0
    # An edited system text is named, and where it begins to differ.
    browser.evaluate(
        "{ const f = document.querySelector('#system'); f.value = 'It is late. ' + f.value;"
        " f.dispatchEvent(new Event('input')); }"
    )
    browser.type("#ask", "Why?", enter=True)
    browser.wait_for(
        "document.querySelector('#stop').hidden && "
        "document.querySelectorAll('.turn.assistant').length == 3"
    )
    assert "system text differs" in browser.evaluate(because.replace("[1]", "[2]"))
    # Conversations outlive the page; the key does not leave its tab.
    kept = json.loads(browser.evaluate("localStorage.getItem('vllm.chats')"))
    assert [turn["role"] for turn in kept[0]["turns"]] == ["user", "assistant"] * 3
    assert browser.evaluate("JSON.stringify(localStorage)").find(_KEY) == -1
    browser.open(f"{dev_server.url}/")
    browser.wait_for("document.querySelectorAll('.turn.assistant').length == 3")
    assert browser.errors == []


def test_the_cache_is_drawn(dev_server: ServerProcess, browser: Chromium) -> None:
    _open(browser, f"{dev_server.url}/cache")
    browser.wait_for("document.querySelectorAll('svg .branch').length >= 3")
    names = browser.evaluate("document.querySelector('#rows').textContent")
    assert "cmpl-second<b>&" in names
    assert browser.evaluate("document.querySelectorAll('#rows b').length") == 0
    # From the keyboard, as one without a mouse would.
    browser.evaluate(
        "document.querySelector('svg .branch[aria-label^=\"tokens 0 to 288,\"]').focus()"
    )
    browser.press("Enter")
    assert "0 – 288" in browser.evaluate("document.querySelector('#detail').textContent")
    _complete(dev_server, list(range(500, 700)), "fourth")
    browser.wait_for("document.querySelector('#rows').textContent.includes('cmpl-fourth')")
    browser.evaluate("document.querySelector('#rows button').click()")
    browser.wait_for("document.querySelector('#why').textContent.includes('never seen before')")
    assert browser.errors == []


def test_a_wrong_key_is_said(dev_server: ServerProcess, browser: Chromium) -> None:
    browser.open(f"{dev_server.url}/cache")
    browser.wait_for("document.querySelector('#gate') && !document.querySelector('#gate').hidden")
    # Nothing was asked for that could be refused.
    assert browser.errors == []
    browser.type("#key", "wrong", enter=True)
    browser.wait_for("document.querySelector('#gate-note').textContent.includes('not valid')")


def test_thoughts_calls_and_several_chats(scripted: ServerProcess, browser: Chromium) -> None:
    """A server without keys, which shows its cache to nobody."""
    tool = {"name": "look_up", "description": "Looks up.", "input_schema": {"type": "object"}}
    browser.open(f"{scripted.url}/")
    browser.wait_for("document.querySelector('#model') && document.querySelector('#model').value")
    assert not browser.evaluate("document.querySelector('#cache-off').hidden")
    fields = json.dumps({"#max-tokens": 200, "#temperature": 0, "#tools": json.dumps([tool])})
    browser.evaluate(
        f"for (const [id, value] of Object.entries({fields})) {{"
        "const f = document.querySelector(id); f.value = value;"
        "f.dispatchEvent(new Event('input')); }"
        "document.querySelector('#thinking').click()"
    )
    browser.type("#ask", "How is the weather in Bergen?", enter=True)
    browser.wait_for("document.querySelectorAll('.call textarea').length == 1")
    assert browser.evaluate("document.querySelector('.thought').open") is False
    assert "I look it up." in browser.evaluate("document.querySelector('.thought').textContent")
    call = browser.evaluate("document.querySelector('.call').textContent")
    assert "Calls look_up" in call
    assert "Bérgen 🏔" in call
    browser.type(".call textarea", "It rains.")
    browser.evaluate("document.querySelector('#send').click()")
    browser.wait_for(
        "document.querySelector('#stop').hidden && "
        "document.querySelectorAll('.turn.assistant').length == 2"
    )
    said = browser.evaluate("document.querySelectorAll('.turn.user')[1].textContent")
    assert "Result of look_up" in said
    assert "It rains." in said
    # Another conversation, back to the first one, and one that is deleted.
    browser.evaluate("document.querySelector('#new').click()")
    browser.type("#ask", "Hello", enter=True)
    browser.wait_for(
        "document.querySelector('#stop').hidden && "
        "document.querySelectorAll('.turn.assistant').length == 1"
    )
    browser.evaluate("document.querySelectorAll('#list .title')[1].click()")
    browser.wait_for("document.querySelectorAll('.turn.assistant').length == 2")
    browser.evaluate("document.querySelector('#list .quiet').click()")
    browser.wait_for("document.querySelectorAll('#list li').length == 1")
    assert browser.errors == []


def test_a_pasted_picture_is_sent_shown_and_hit(tmp_path: Path, browser: Chromium) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_seeing("qwen35", model)
    data = base64_of(picture(1, 160, 96))
    paste = (
        f"(() => {{ const bytes = Uint8Array.from(atob({json.dumps(data)}), c => c.charCodeAt(0));"
        "const dt = new DataTransfer();"
        "dt.items.add(new File([bytes], 'a.png', {type: 'image/png'}));"
        "document.querySelector('#ask').dispatchEvent(new ClipboardEvent('paste',"
        " {clipboardData: dt, bubbles: true, cancelable: true})); })()"
    )
    flags = ("--block-size", "16", "--enable-prompt-tokens-details")
    with ServerProcess(tmp_path / "log.txt", *flags, model=str(model)) as server:
        browser.open(f"{server.url}/")
        browser.wait_for(
            "document.querySelector('#model') && document.querySelector('#model').value"
        )
        browser.evaluate("document.querySelector('#max-tokens').value = 4")
        for turn in (1, 2):
            browser.evaluate(paste)
            browser.wait_for("!document.querySelector('#pictures').hidden")
            # The message keeps its line: neither the picture nor a button takes its room.
            assert browser.evaluate(
                "document.querySelector('#ask').offsetWidth >"
                " document.querySelector('#composer').offsetWidth / 2"
            )
            browser.type("#ask", "What is it?", enter=True)
            browser.wait_for(
                "document.querySelector('#stop').hidden && "
                f"document.querySelectorAll('.turn.assistant').length == {turn}"
            )
        widths = "[...document.querySelectorAll('.turn.user img')].map(i => i.naturalWidth).join()"
        assert browser.evaluate(widths) == "160,160"
        # The first turn says for how long its picture was read; the second had that from before.
        waits = "[...document.querySelectorAll('.turn.assistant')].map("
        waits += "turn => turn.querySelectorAll('.wait .lane i').length).join()"
        assert browser.evaluate(waits) == "1,0"
        hits = "document.querySelectorAll('.turn.assistant')[1].querySelectorAll('.prompt .hit')"
        assert browser.evaluate(f"{hits}.length") == 1
        assert browser.errors == []
