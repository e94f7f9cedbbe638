"""Replaying traces: rates are bounded by the ideal, bad traces are refused."""

import json
from pathlib import Path

import pytest

from benchmarks.replay import (
    TraceRequest,
    format_table,
    ideal_hit_rate,
    main,
    make_config,
    make_pinning,
    make_policy,
    read_trace,
    replay,
)
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.pinning import PinSettings

POLICIES = ["none", "0", "4096", "auto", "pinned", "0+pinned", "vllm-none", "vllm-4096"]
POLICIES += ["vllm-pinned", "today", "today+lean", "today+private", "today+all"]


def chat_trace(num_sessions: int = 6, num_turns: int = 4) -> list[TraceRequest]:
    """Sessions that take turns; each turn sends the last one's whole spans and 1,024 tokens."""
    trace = []
    for turn in range(num_turns):
        for session in range(num_sessions):
            spans = [0, *range(1000 * session + 1, 1000 * session + 2 * turn + 4)]
            trace.append(TraceRequest(len(spans) * 512, 100, tuple(spans)))
    return trace


def write_trace(path: Path, trace: list[TraceRequest]) -> Path:
    lines = [
        json.dumps(
            {
                "timestamp": 0,
                "input_length": r.num_prompt_tokens,
                "output_length": r.num_output_tokens,
                "hash_ids": r.span_ids,
            }
        )
        for r in trace
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("blocks", ["vllm", "flash"])
def test_no_policy_beats_the_ideal_and_a_roomy_pool_comes_near(name: str, blocks: str) -> None:
    trace = chat_trace()
    config = make_config(name, blocks, 128, 6000)
    unit = config.hit_unit
    assert unit is not None
    policy = make_policy(name, config)
    stats = replay(trace, config, policy, make_pinning(name), outputs=blocks == "flash")
    assert stats.num_requests == len(trace)
    assert stats.hit_tokens + sum(stats.miss_tokens.values()) == stats.prompt_tokens
    assert stats.prompt_tokens == sum(r.num_prompt_tokens for r in trace)
    assert stats.hit_rate <= ideal_hit_rate(trace, unit) + 1e-9
    if name in ("0", "auto", "today+private"):
        # The shared first span is discovered by the second session, and hit from the third on.
        lost = 512 + (6 - 1) * unit
        assert stats.hit_tokens >= ideal_hit_rate(trace, unit) * stats.prompt_tokens - lost


def test_concurrent_requests_are_all_served() -> None:
    trace = chat_trace()
    config = make_config("auto", "flash", 32, 3000)
    policy = make_policy("auto", config)
    stats = replay(trace, config, policy, concurrency=4, chunk=1024)
    assert stats.num_requests == len(trace)


def test_a_dropped_tail_counts_as_missed() -> None:
    trace = [TraceRequest(1300, 1, (1, 2, 3)), TraceRequest(1900, 1, (1, 2, 4, 5))]
    config = make_config("auto", "vllm", 128, 3000)
    for tail, dropped in (("drop", 1300 - 1025 + 1900 - 1537), ("aligned", 276 + 364)):
        stats = replay(trace, config, make_policy("auto", config), tail=tail)
        assert stats.hit_tokens == 1024
        assert stats.prompt_tokens == 3200
        assert stats.miss_tokens["dropped_tail"] == dropped
    kept = replay(trace, config, make_policy("auto", config), tail="keep")
    assert "dropped_tail" not in kept.miss_tokens
    assert kept.prompt_tokens == 3200


def test_which_tokens_of_a_prompt_are_served() -> None:
    tails = ("drop", "aligned", "keep")
    for n, expected in ((1300, [1025, 1024, 1300]), (1024, [1024] * 3), (300, [300] * 3)):
        request = TraceRequest(n, 1, (1, 2, 3))
        assert [request.num_served_tokens(tail) for tail in tails] == expected


def test_vllms_terms_go_with_vllms_policies() -> None:
    config = make_config("vllm-none", "vllm", 128, 3000)
    assert config.hit_unit == 256
    group = CacheGeometry.from_config(config).windows[0]
    for name in ("vllm-none", "vllm-pinned"):
        policy = make_policy(name, config)
        assert list(policy.grid(0, 600)) == [256, 512]
        assert policy.junction_boundaries(512) == ()
        assert policy.prompt_boundaries(300) == (256,)
        # Every row of a chunk takes a block.
        rows = policy.window_blocks(group, 0, 2048, 2048, ())
        assert len(rows) == 2048 // group.block_size
    assert make_pinning("vllm-none") is None
    assert make_pinning("vllm-pinned") == make_pinning("pinned") == PinSettings(0.25)
    ours = make_config("pinned", "vllm", 128, 9)
    policy = make_policy("pinned", ours)
    assert policy.junction_boundaries(512) == (512,)
    group = CacheGeometry.from_config(ours).windows[0]
    assert len(policy.window_blocks(group, 0, 2048, 2048, ())) < 2048 // group.block_size


def test_the_ideal_counts_first_matches_only() -> None:
    trace = [TraceRequest(1024, 1, (1, 2)), TraceRequest(1536, 1, (1, 3, 2))]
    assert ideal_hit_rate(trace, 128) == 512 / 2560
    assert ideal_hit_rate([trace[0], trace[0]], 128) == (1023 // 128 * 128) / 2048


def test_main_prints_a_table_and_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.jsonl", chat_trace())
    main([str(path), "--policies", "auto", "--pages", "4000", "--every", "2", "--limit", "5"])
    out = capsys.readouterr().out
    line = json.loads(out.splitlines()[-1])
    (run,) = line["values"]["runs"]
    assert line["config"]["requests"] == 5
    assert f"| auto | {100 * run['hit_rate']:.1f} |" in out


def test_a_unit_below_the_window_blocks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trace.jsonl", "--unit", "32"])
    assert "use --unit 64 or 128, or --blocks flash" in capsys.readouterr().err


def test_simulated_rates_stand_beside_whole_traces_only() -> None:
    rates = {"today": {16384: 1.0}}
    assert "1.0 (9.2)" in format_table(rates, [16384], is_whole_trace=True)
    assert "9.2" not in format_table(rates, [16384], is_whole_trace=False)


def test_bad_traces_are_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "short.jsonl", [TraceRequest(5000, 1, (1, 2))])
    with pytest.raises(ValueError, match="2 hash_ids for 5000 tokens"):
        list(read_trace(path))
    path.write_text('{"input_length": 5}', encoding="utf-8")
    with pytest.raises(ValueError, match="output_length"):
        list(read_trace(path))
