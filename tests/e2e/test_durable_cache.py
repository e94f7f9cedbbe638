"""A server with a prefix cache on disk, killed under load and started again."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.server_process import NO_TLS, ServerProcess


def ask(server: ServerProcess, prompt: list[int], max_tokens: int = 8) -> tuple[str, int]:
    """Return a greedy answer, and how much of its prompt was cached."""
    body: dict[str, Any] = {"model": "deepseek-v4", "prompt": prompt, "max_tokens": max_tokens}
    body |= {"temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", body).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def serve(tmp_path: Path, log: str, *flags: str) -> ServerProcess:
    folder = str(tmp_path / "cache")
    limits = ("--prefix-cache-dir", folder, "--prefix-cache-disk-size", "64MiB")
    return ServerProcess(
        tmp_path / log,
        *limits,
        "--enable-prompt-tokens-details",
        *flags,
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    )


def kill(server: ServerProcess) -> None:
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def look(server: ServerProcess) -> dict[str, Any]:
    """What the cache page shows."""
    url = f"{server.url}/cache/events"
    with httpx.stream("GET", url, timeout=60, verify=NO_TLS) as response:
        line = next(line for line in response.iter_lines() if line.startswith("data: {"))
    view: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return view


def count_kept(server: ServerProcess) -> int:
    """How many checkpoints could be found on the disk by now."""
    return int(look(server)["offload"]["tiers"]["disk"]["objects"].get("state", 0))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def load(server: ServerProcess, prompts: list[list[int]], answers: dict[int, str]) -> None:
    """Ask until the server dies; what was answered is remembered."""
    for index, prompt in enumerate(prompts):
        try:
            text, _ = ask(server, prompt)
        except (httpx.HTTPError, KeyError, ValueError):
            return
        assert answers.setdefault(index, text) == text


def test_answers_and_hits_after_a_kill_under_load(tmp_path: Path) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(10, 1000) for _ in range(rng.randrange(150, 600))] for _ in range(8)]
    answers: dict[int, str] = {}
    with serve(tmp_path, "first.txt") as server:
        client = threading.Thread(target=load, args=(server, prompts, answers))
        client.start()
        # Under load still: the last ones are being computed, or written.
        # One may be lost with the kill, and one is in the pool before anybody asks.
        wait_for(lambda: len(answers) >= 5 and count_kept(server) >= 5)
        kill(server)
        client.join()
    with serve(tmp_path, "last.txt", "--prefix-cache-warm", "1") as server:
        wait_for(lambda: look(server)["offload"]["warm_start"]["state"] == "done")
        hits = {}
        for index, prompt in enumerate(prompts):
            text, hits[index] = ask(server, prompt)
            assert answers.get(index, text) == text
        # What could be found when the server was killed is there.
        assert sum(hits[index] >= len(prompts[index]) // 128 * 128 - 128 for index in hits) >= 3
        restored = server.metric("vllm:external_prefix_cache_hits_total")
        name = "vllm:prompt_tokens_cached_by_source_total"
        assert server.metric(name, source="disk") == restored > 0
        # One was in the pool before anybody asked.
        assert server.metric(name, source="device") == sum(hits.values()) - restored > 0
        assert "1 prefixes of" in server.log
        assert server.metric("vllm:kv_offload_load_bytes_total") > 0
        outcomes = "vllm:kv_offload_restore_outcomes_total"
        assert server.metric(outcomes, outcome="restored") >= 3
        assert "row groups are there" in server.log
        # The same on the page, which is drawn anew every now and then, and for a request.
        sources = {"pool": sum(hits.values()) - restored, "disk": restored}
        wait_for(lambda: look(server)["sources"] == sources)
        view = look(server)
        disk = view["offload"]["tiers"]["disk"]
        assert (disk["state"], disk["max_bytes"]) == ("ready", 64 << 20)
        assert 0 < disk["live_bytes"] <= disk["used_bytes"] < disk["max_bytes"]
        assert view["offload"]["warm_start"]["state"] == "done"
        assert view["offload"]["restores"]["restored"] >= 3
        shown = next(one for one in view["admissions"] if "disk" in one["sources"])
        told = server.get(f"/v1/cache/explain/{shown['request_id']}").json()
        assert told["sources"] == shown["sources"]
        assert sum(told["sources"].values()) == told["cached_tokens"]
        assert told["spans"][0]["begin"] == told["cached_tokens"]
        assert told["spans"][-1]["end"] == told["prompt_tokens"]
    assert "Traceback" not in server.log
