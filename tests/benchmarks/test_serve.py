"""The whole of ``vllm bench serve`` against a stub server."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.stub_server import Stub, completion, events, serving, usage
from vllm.entrypoints.cli.main import main


def _answer(body: dict[str, Any]) -> list[str]:
    """One chunk a token; the second half of the requests hits."""
    count = body["max_tokens"]
    chunks = [completion(" x", "length" if i == count - 1 else None) for i in range(count)]
    return events(*chunks, usage(len(body["prompt"].split()), count, cached_tokens=8))


@pytest.fixture
def stub() -> Iterator[Stub]:
    """A stub in a thread: the command runs an event loop of its own."""
    made = Stub(_answer)
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        async with serving(made):
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(120)
    yield made
    loop.call_soon_threadsafe(stop.set)
    thread.join(120)
    loop.close()


def _bench(stub: Stub, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    common = ("--base-url", stub.url, "--skip-tokenizer-init", "--disable-tqdm", "--save-result")
    place = ("--result-dir", str(tmp_path), "--result-filename", "r.json")
    code = main(["bench", "serve", *common, *place, *flags])
    return code, json.loads((tmp_path / "r.json").read_text())


@pytest.mark.slow
def test_a_run_end_to_end(stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, timeline = tmp_path / "p.png", tmp_path / "t.png"
    counter = 'vllm:prefix_cache_miss_tokens_total{reason="first_seen"}'
    stub.metrics = lambda bodies: (
        f"# TYPE vllm:prefix_cache_miss_tokens_total counter\n{counter} {8 * bodies}\n"
    )
    code, result = _bench(
        stub,
        tmp_path,
        *("--random-input-len", "16", "--random-output-len", "3", "--num-prompts", "12"),
        *("--max-concurrency", "3", "--num-warmups", "2", "--save-detailed", "--seed", "4"),
        *("--metadata", "site=here", "--goodput", "ttft:60000", "--request-rate", "500"),
        *("--plot", str(plot), "--plot-timeline", str(timeline), "--header", "X-A=b"),
    )
    assert code == 0
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["output_lens"] == [3] * 12
    assert result["input_lens"] == [16] * 12
    assert (result["site"], result["model_id"], result["request_rate"]) == ("here", "stub", 500)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["max_concurrent_requests"] <= 3
    assert result["prefix_cache"]["hit_rate"] == 0.5
    # Of the load alone: warm-ups were counted before.
    assert result["prefix_cache"]["miss_tokens"] == {"first_seen": 12 * 8}
    assert len(stub.bodies) == 14
    assert stub.headers[-1]["X-A"] == "b"
    assert plot.read_bytes()[:4] == timeline.read_bytes()[:4] == b"\x89PNG"
    assert "Hit rate (% of prompt tokens):           50.00" in capsys.readouterr().out


def test_probes_are_sent_beside_the_load_and_counted_apart(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = _bench(
        stub,
        tmp_path,
        *("--random-input-len", "8", "--random-output-len", "2", "--num-prompts", "3"),
        *("--request-rate", "10", "--burstiness", "inf", "--probe-request-rate", "20"),
    )
    assert code == 0
    assert (result["completed"], result["total_output_tokens"]) == (3, 6)
    probes = [body for body in stub.bodies if body["max_tokens"] == 8]
    assert len({body["prompt"] for body in probes}) == len(probes) > 0
    assert (result["probes"]["completed"], result["probes"]["failed"]) == (len(probes), 0)
    assert 0 < result["probes"]["mean_ttft_ms"] <= result["probes"]["mean_e2el_ms"]
    assert f"Successful probes:                       {len(probes)}" in capsys.readouterr().out


@pytest.mark.parametrize("rate", ["-1", "inf"])
def test_a_rate_of_probes_that_is_none_is_refused(rate: str) -> None:
    assert main(["bench", "serve", "--probe-request-rate", rate]) == 2


EXPECTED_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "max_output_tokens_per_s", "rtfx"),
    "max_concurrent_requests",
    *(
        f"{kind}_{name}_ms"
        for kind in ("mean", "median", "std", "p50", "p90")
        for name in ("ttft", "tpot", "itl", "e2el")
    ),
}


@pytest.mark.slow
def test_the_result_has_the_keys_people_know(stub: Stub, tmp_path: Path) -> None:
    flags = ("--random-input-len", "4", "--num-prompts", "2", "--metric-percentiles", "50,90")
    _, result = _bench(stub, tmp_path, *flags)
    assert result.keys() >= EXPECTED_KEYS
    assert not result.keys() & {"input_lens", "generated_texts"}
    # The same seed sends the same prompts.
    before = sorted(body["prompt"] for body in stub.bodies)
    stub.bodies.clear()
    _bench(stub, tmp_path, *flags)
    assert sorted(body["prompt"] for body in stub.bodies) == before


def test_a_run_without_success_says_so(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.answer = lambda _: events({"error": {"message": "out of order"}})
    code, result = _bench(stub, tmp_path, "--num-prompts", "2", "--random-input-len", "4")
    assert (code, result["failed"]) == (1, 2)
    assert "2 failed: out of order" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--goodput", "ttft"),
        ("--metadata", "x"),
        ("--header", "x"),
        ("--max-concurrency", "0"),
        ("--num-prompts", "0"),
        ("--plot", "x.txt"),
        ("--dataset-name", "hf"),
    ],
)
def test_senseless_flags_are_refused(
    stub: Stub, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["bench", "serve", "--base-url", stub.url, "--skip-tokenizer-init"]
    assert main([*base, *flags]) == 2
    assert flags[0] in capsys.readouterr().err
    assert stub.bodies == []


@pytest.mark.parametrize(
    "flags", [("--use-beam-search",), ("--lora-modules", "a"), ("--random-batch-size", "2")]
)
def test_flags_of_others_are_refused_by_name(
    stub: Stub, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--base-url", stub.url, *flags])
    assert f"{flags[0]}" in (said := capsys.readouterr().err)
    assert "not supported" in said
    assert stub.bodies == []
