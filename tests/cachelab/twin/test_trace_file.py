"""Traces that are not as they should be: cut, dropped, foreign, of another version."""

import json
from pathlib import Path

import pytest

from tests.cachelab.twin.recorded_run import (
    RecordedRun,
    Script,
    make_prompt,
    small_settings,
)
from vllm.cachelab.twin.exact import ExactTwin
from vllm.cachelab.twin.rebuild import regroup
from vllm.cachelab.twin.trace_file import read_trace
from vllm.entrypoints.cli.main import main
from vllm.exceptions import ConfigError


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RecordedRun]:
    """A run of forty requests."""
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    run = RecordedRun(path, small_settings(num_blocks=400), seed=5)
    run.run(40)
    return path, run


def test_bad_lines_are_counted_or_refused(
    recorded: tuple[Path, RecordedRun], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "bad.jsonl"
    lines = recorded[0].read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "{oops", '["Q",1]', *lines[3:], lines[-2][:9]]))
    trace = read_trace(path)
    assert trace.bad.count == 3
    assert "3 lines were skipped" in caplog.text
    assert "line 4 of" in caplog.text
    assert trace.requests
    with pytest.raises(ConfigError, match="line 4 of"):
        read_trace(path, is_strict=True)


def test_requests_that_cannot_have_been_are_bad_lines(
    recorded: tuple[Path, RecordedRun], tmp_path: Path
) -> None:
    path = tmp_path / "odd.jsonl"
    lines = recorded[0].read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith('["A"'))
    added = json.loads(lines[place])
    # Twice; and with other numbers of prompt tokens, and of an answer's.
    odd = [added, *([*added[:4], n, *added[5:]] for n in (0, 10**12)), [*added[:5], 0, *added[6:]]]
    for number, line in enumerate(odd[1:], 1000):
        line[1], line[2] = number, f"odd-{number}"
    lines[place + 1 : place + 1] = map(json.dumps, odd)
    path.write_text("\n".join(lines))
    trace = read_trace(path)
    assert trace.bad.count == len(odd)
    assert trace.requests.keys() == read_trace(recorded[0]).requests.keys()
    assert ExactTwin(trace).run().diverged_at is None


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ('{"format": "vllm-cache-trace", "version": 7, "server": "9.9"}', "version 7.*9.9"),
        ('{"format": "vllm-cache-trace", "version": 1}', "not whole"),
        ('{"timestamp": 0, "input_length": 5}', "vllm bench replay"),
        ("what?", "no JSON"),
    ],
)
def test_foreign_files_are_refused_by_name(first: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(first + "\n")
    with pytest.raises(ConfigError, match=message):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_nothing_of_the_text_is_written(recorded: tuple[Path, RecordedRun]) -> None:
    path, run = recorded
    header, *lines = path.read_text().splitlines()
    assert json.loads(header)["format"] == "vllm-cache-trace"
    text = "\n".join(lines)
    for prompt in run.prompts:
        if len(prompt) >= 3:
            assert json.dumps(prompt[:3])[1:-1] not in text
            assert json.dumps(prompt[:3], separators=(",", ":"))[1:-1] not in text


@pytest.mark.slow
def test_a_trace_is_bounded_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, bound = tmp_path / "t.jsonl", 1 << 16
    script = Script(path, bound, num_blocks=400)
    for seed in range(90):
        script.serve(make_prompt(seed, 1500))
    script.run.scheduler.shutdown()
    parts = [path, tmp_path / "t.jsonl.1"]
    assert sum(part.stat().st_size for part in parts) < 1.3 * bound
    trace = read_trace(path, is_strict=True)
    assert not trace.is_whole
    assert 0 < len(trace.requests) < 90
    assert main(["cache", "simulate", str(path)]) == 0
    assert "begins in the middle" in capsys.readouterr().out


@pytest.mark.slow
def test_two_parts_are_one_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    run = RecordedRun(path, small_settings(num_blocks=400), seed=7, max_bytes=1 << 16)
    run.run(70)
    assert (tmp_path / "t.jsonl.1").exists()
    trace = read_trace(path)
    assert trace.is_whole
    result = ExactTwin(trace).run()
    twin = {trace.requests[n].request_id: c for n, c in result.cached_tokens.items()}
    assert twin == run.cached


@pytest.mark.slow
def test_simulate_prints_the_grid_and_writes_each_request(
    recorded: tuple[Path, RecordedRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = recorded
    out, result = tmp_path / "out.jsonl", tmp_path / "grid.json"
    cost, plot = tmp_path / "cost.json", tmp_path / "p.png"
    flags = ("--per-request", out, "--output-json", result, "--save-cost", cost, "--plot", plot)
    grid = ("--policies", "0", "auto+pins", "--block-size", "64", "--processes", "1")
    code = main(["cache", "simulate", str(path), *map(str, flags), *grid, "--disable-tqdm"])
    assert code == 0
    rows = {row["request_id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert {name: row["cached_tokens"] for name, row in rows.items()} == {
        name.removesuffix("-0-0123abcd-0000000a"): cached for name, cached in run.cached.items()
    }
    runs = json.loads(result.read_text())["runs"]
    assert [(r["policy"], r["block_size"]) for r in runs] == [
        ("auto", 32),
        ("0", 64),
        ("auto+pins", 64),
    ]
    assert all(0 <= r["hit_rate"] < 1 and r["computed"] > 0 for r in runs)
    text = capsys.readouterr().out
    assert f"equal for {len(run.cached)} of {len(run.cached)} requests" in text
    assert "Most hits: " in text
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert json.loads(cost.read_text())["per_step"] >= 0
    assert main(["cache", "simulate", str(path), "--block-size", "48"]) == 2
    assert "no multiple" in capsys.readouterr().err


def test_larger_units_take_the_last_hash_of_theirs() -> None:
    hashes = [bytes([i]) for i in range(5)]
    assert regroup(hashes, 32, 64) == [b"\x01", b"\x03"]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="smaller one"):
        regroup(hashes, 64, 32)  # type: ignore[arg-type]
