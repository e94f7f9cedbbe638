"""A fleet on a real Ray cluster of two nodes: one server's tokens, foretold hits, lost replicas."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.ports import free_ports
from tests.ray_cluster import start_serve
from vllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    # What Ray and Serve warn of, in their own modules, is theirs.
    pytest.mark.filterwarnings("ignore"),
]

STORY = "The access code of the archive is 7302. The access code of the harbour is 1186. " * 12


@pytest.fixture(scope="module")
def fleet(cluster: Any) -> Iterator[str]:
    """The address of a fleet of two replicas."""
    from ray import serve

    from vllm.ray_serve import FleetArgs, app

    port = free_ports()
    start_serve(port)
    flags = "--block-size 32 --enable-prompt-tokens-details --max-num-seqs 8"
    try:
        serve.run(app(FleetArgs(replicas=2, flags=flags)), name="fleet", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()


def ask(fleet: str, prompt: str, num_tokens: int = 6, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, **more}
    answer = httpx.post(f"{fleet}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def conversations() -> list[list[str]]:
    """Turns of four conversations with one beginning."""
    return [
        [STORY + f"Conversation {name}. " + "And then? " * (3 * turn) for turn in range(1, 4)]
        for name in ("one", "two", "three", "four")
    ]


def test_conversations_get_one_servers_tokens_and_hits_are_foretold(fleet: str, alone: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    expected = {
        prompt: alone.generate([prompt], params)[0].outputs[0].text
        for turns in conversations()
        for prompt in turns
    }

    def converse(turns: list[str]) -> list[dict[str, Any]]:
        return [ask(fleet, prompt) for prompt in turns]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(converse, conversations()))
    for turns, given in zip(conversations(), answers, strict=True):
        for prompt, answer in zip(turns, given, strict=True):
            assert answer["choices"][0]["text"] == expected[prompt]
        for answer in given[1:]:
            details = answer["usage"]["prompt_tokens_details"]
            # The next turn went where the last one was computed.
            assert details["cached_tokens"] > 0.8 * answer["usage"]["prompt_tokens"] - 64
            assert (details["prediction"], details["predicted_tokens"]) == (
                "exact",
                details["cached_tokens"],
            )
    metrics = httpx.get(f"{fleet}/metrics").text
    assert 'vllm:prefix_cache_predictions_total{engine="0",' in metrics
    assert 'vllm:prompt_tokens_total{engine="1",' in metrics
    # A rank that there is not, and one chosen.
    wrong = httpx.post(
        f"{fleet}/v1/completions",
        json={"prompt": "x", "max_tokens": 1},
        headers={"X-data-parallel-rank": "5"},
    )
    assert wrong.status_code == 400
    assert httpx.get(f"{fleet}/v1/models").json()["data"][0]["id"] == "deepseek-v4"


def find_cores() -> list[psutil.Process]:
    """The processes of the engine cores: below the cluster's nodes, this process's children."""
    found = []
    for node in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if node.name() != "raylet":
                continue
            for process in node.children(recursive=True):
                if "vllm.v1.engine.core_proc" in " ".join(process.cmdline()):
                    found.append(process)
    return found


def find_busy(cores: list[psutil.Process]) -> psutil.Process | None:
    """The core that computed by far most in a second; None: none did."""
    before = {process: sum(process.cpu_times()[:2]) for process in cores}
    time.sleep(1.0)
    grown = {p: sum(p.cpu_times()[:2]) - seconds for p, seconds in before.items()}
    *others, busy = sorted(grown, key=grown.__getitem__)
    return busy if grown[busy] > 0.02 + 3 * max(grown[p] for p in others) else None


def test_a_replica_that_dies_takes_only_what_it_had_begun(fleet: str) -> None:
    prompt = STORY + "Tell me more."
    assert ask(fleet, prompt)["usage"]["completion_tokens"] == 6
    ended: list[str] = []

    def read_stream() -> None:
        body = {"prompt": prompt, "max_tokens": 12_000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{fleet}/v1/completions", json=body, timeout=120) as stream:
            ended.extend(line for line in stream.iter_lines() if line)

    reader = threading.Thread(target=read_stream)
    reader.start()
    cores = find_cores()
    assert len(cores) == 2
    busy = None
    while busy is None and reader.is_alive():
        busy = find_busy(cores)
    assert busy is not None
    os.kill(busy.pid, signal.SIGKILL)
    reader.join(120)
    assert not reader.is_alive()
    # The stream that had begun says why it ends, and is computed nowhere else.
    assert "died while it answered" in ended[-1] or "died while it answered" in ended[-2]
    # Others are answered meanwhile, by who is left.
    assert ask(fleet, prompt)["usage"]["completion_tokens"] == 6
    assert httpx.get(f"{fleet}/health").status_code == 200
    # Then nobody is left, until there are new ones.
    for core in find_cores():
        core.kill()
    deadline = time.monotonic() + 240
    body = {"prompt": prompt, "max_tokens": 6}
    while httpx.post(f"{fleet}/v1/completions", json=body, timeout=120).status_code != 200:
        assert time.monotonic() < deadline, "no new replica came"
    while len(find_cores()) < 2:
        assert time.monotonic() < deadline, "no second one came"
        time.sleep(0.5)
