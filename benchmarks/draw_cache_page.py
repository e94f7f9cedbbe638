"""Draw the picture in docs/cache_page.md anew: a server with tiers, some chats, a headless browser.

    python -m benchmarks.draw_cache_page docs/images/cache_page.png

Needs chromium or chromium-headless-shell. Two lives of a server over one folder, with a pool too
small for what is asked: chats go on over the restart, so hits come from the pool, host memory and
the disk. The page is drawn when the last chat was answered.
"""

import argparse
import random
import tempfile
from pathlib import Path

import httpx

from tests.e2e.chromium import Chromium
from tests.e2e.server_process import ServerProcess

_POOL_BYTES = 7 << 20
_HEADS = ("agent", "support", "review")


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


def main() -> None:
    """Serve, ask, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path)
    picture = parser.parse_args().picture
    chats = Chats(seed=2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ("--prefix-cache-dir", str(folder / "cache"), "--prefix-cache-disk-size", "64MiB")
        flags += ("--kv-offloading-size", "0.004", "--kv-cache-memory-bytes", str(_POOL_BYTES))
        flags += ("--max-model-len", "2048", "--cache-trace", str(folder / "trace"))
        for life in (1, 2):
            environment = {"VLLM_SERVER_DEV_MODE": "1"}
            with ServerProcess(folder / f"{life}.txt", *flags, environment=environment) as server:
                chats.go_on(server, 14, life)
                if life == 1:
                    continue
                with Chromium(folder, width=1240) as browser:
                    browser.open(f"{server.url}/cache")
                    browser.wait_for("document.querySelectorAll('svg .branch').length >= 3")
                    browser.wait_for("document.querySelectorAll('#rows tr').length >= 5")
                    browser.evaluate(
                        "document.querySelector('svg .branch')"
                        ".dispatchEvent(new MouseEvent('click'))"
                    )
                    browser.screenshot(picture)
                    assert browser.errors == [], browser.errors


if __name__ == "__main__":
    main()
