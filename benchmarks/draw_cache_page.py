"""Draw the pictures in docs/ anew: a server with tiers, some chats, a headless browser.

    python -m benchmarks.draw_cache_page docs/images

Needs chromium or chromium-headless-shell. Two lives of a server over one folder, with a pool too
small for what is asked: chats go on over the restart, so hits come from the pool, host memory and
the disk. ``cache_page.png`` is drawn when the last chat was answered, ``second_turn.png`` when the
page's own chat has had two turns. ``--all`` draws both in light and dark, at 1,280 and 400 pixels.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import httpx

from tests.e2e.chromium import Chromium
from tests.e2e.server_process import ServerProcess

_POOL_BYTES = 7 << 20
_HEADS = ("agent", "support", "review")
_SYSTEM = "You look after a small garden. The access code of Mira is 4827. " + (
    "The garden is quiet. It rained all day. " * 25
)
_TURNS = ("What is the access code of Mira?", "And how is the garden today?")


class Chats:
    """Conversations of numbers that share a few beginnings."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        heads = {name: self._draw(420) for name in _HEADS}
        self._said = {f"{name}-{i}": list(heads[name]) for name in _HEADS for i in (1, 2)}

    def _draw(self, count: int) -> list[int]:
        return [self._rng.randrange(10, 2000) for _ in range(count)]

    def go_on(self, server: ServerProcess, num_turns: int, life: int) -> None:
        """Take turns."""
        for turn in range(num_turns):
            name = self._rng.choice(sorted(self._said))
            self._said[name] += self._draw(self._rng.randrange(30, 160))
            body = {"prompt": self._said[name], "max_tokens": 8, "ignore_eos": True}
            headers = {"X-Request-Id": f"{name}-{life}{turn:02d}"}
            httpx.post(
                f"{server.url}/v1/completions", json=body, headers=headers, timeout=120
            ).raise_for_status()


class Painter:
    """Takes pictures of a page.

    Args:
        browser: With the page.
        folder: Where pictures go.
        draws_all: Whether to draw each in light and dark, wide and narrow.
    """

    def __init__(self, browser: Chromium, folder: Path, *, draws_all: bool) -> None:
        self._browser, self._folder, self._draws_all = browser, folder, draws_all

    def draw(self, name: str, *, height: int, whole: bool = False) -> None:
        """Draw the page as it is."""
        looks = [(1280, False)]
        if self._draws_all:
            looks += [(1280, True), (400, False), (400, True)]
        for width, dark in looks:
            self._browser.show(width, height, dark=dark)
            self._browser.evaluate("dispatchEvent(new Event('resize'))")
            self._browser.evaluate("new Promise(done => setTimeout(done, 300))", waits=True)
            suffix = f"_{width}_{'dark' if dark else 'light'}" if self._draws_all else ""
            self._browser.screenshot(self._folder / f"{name}{suffix}.png", whole=whole)


def chat(browser: Chromium) -> None:
    """Have a chat of two turns on the page."""
    browser.wait_for("document.querySelector('#model') && document.querySelector('#model').value")
    fields = json.dumps({"#max-tokens": 40, "#temperature": 0, "#system": _SYSTEM})
    browser.evaluate(
        f"for (const [id, value] of Object.entries({fields})) {{"
        "const f = document.querySelector(id);"
        "f.value = value; f.dispatchEvent(new Event('input')); }"
    )
    for number, text in enumerate(_TURNS, start=1):
        browser.type("#ask", text, enter=True)
        browser.wait_for(
            "document.querySelector('#stop').hidden && "
            f"document.querySelectorAll('.turn.assistant .foot').length == {number}"
        )


def main() -> None:
    """Serve, ask, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pictures", type=Path, help="The folder.")
    parser.add_argument("--all", action="store_true", help="In light and dark, wide and narrow.")
    args = parser.parse_args()
    chats = Chats(seed=2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ("--prefix-cache-dir", str(folder / "cache"), "--prefix-cache-disk-size", "64MiB")
        flags += ("--kv-offloading-size", "0.004", "--kv-cache-memory-bytes", str(_POOL_BYTES))
        flags += ("--max-model-len", "2048", "--cache-trace", str(folder / "trace"))
        flags += ("--enable-prompt-tokens-details",)
        for life in (1, 2):
            environment = {"VLLM_SERVER_DEV_MODE": "1"}
            with ServerProcess(folder / f"{life}.txt", *flags, environment=environment) as server:
                chats.go_on(server, 14, life)
                if life == 1:
                    continue
                with Chromium(folder) as browser:
                    painter = Painter(browser, args.pictures, draws_all=args.all)
                    browser.show(1280, 900, dark=False)
                    browser.open(f"{server.url}/cache")
                    browser.wait_for("document.querySelectorAll('svg .branch').length >= 3")
                    browser.wait_for("document.querySelectorAll('#rows tr').length >= 5")
                    browser.evaluate(
                        "document.querySelector('svg .branch')"
                        ".dispatchEvent(new MouseEvent('click'))"
                    )
                    painter.draw("cache_page", height=900, whole=True)
                    browser.show(1280, 820, dark=False)
                    browser.open(f"{server.url}/")
                    chat(browser)
                    browser.evaluate(
                        "document.activeElement.blur();"
                        "document.querySelector('.turn:last-child .computed').click()"
                    )
                    painter.draw("second_turn", height=820)
                    assert browser.errors == [], browser.errors


if __name__ == "__main__":
    main()
