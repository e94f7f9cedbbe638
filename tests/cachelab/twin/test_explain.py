"""Explanations: every reason where it was made to be, and remedies that a replay confirms."""

import json
from pathlib import Path

import pytest

from tests.cachelab.twin.recorded_run import (
    SMALL_V41,
    RecordedRun,
    Script,
    make_prompt,
    small_settings,
)
from vllm.cachelab.twin.exact import ExactTwin
from vllm.cachelab.twin.explain import Explainer, Explanation, format_explanation, to_json
from vllm.cachelab.twin.trace_file import CacheTrace, read_trace
from vllm.entrypoints.cli.main import main


def _explain(script: Script, request_id: str) -> Explanation:
    """End a run and explain one of its requests."""
    script.run.scheduler.shutdown()
    return Explainer(read_trace(script.path, is_strict=True)).explain(request_id)


def _check_sum(made: Explanation) -> dict[str, int]:
    at = made.cached_tokens
    for span in made.spans:
        assert span.begin == at
        at = span.end
    assert at == made.prompt_tokens
    return {span.reason: span.end - span.begin for span in made.spans}


def test_a_first_prompt_was_never_seen(tmp_path: Path) -> None:
    script = Script(tmp_path / "t", num_blocks=600)
    made = _explain(script, script.serve(make_prompt(1, 500)))
    assert _check_sum(made) == {"first_seen": 480, "above_last_boundary": 20}
    assert all(span.remedy is None for span in made.spans)


def test_a_changed_token_is_found_and_its_edit_proven(tmp_path: Path) -> None:
    script = Script(tmp_path / "t", num_blocks=600)
    first = make_prompt(1, 500)
    script.serve(first)
    script.serve([*first[:200], 999, *first[201:]])
    # The junction is known now: this one resumes there, and no further.
    made = _explain(script, script.serve([*first[:200], 998, *first[201:]]))
    assert (made.cached_tokens, made.dense_match_tokens) == (192, 192)
    assert _check_sum(made) == {"first_seen": 288, "above_last_boundary": 20}
    remedy = made.spans[0].remedy
    assert remedy is not None
    assert (remedy.kind, remedy.edit_at, remedy.cached_tokens) == ("edit", 192, 480)
    assert 192 in made.checkpoints
    assert made.group_matches[0] == 192


def test_a_window_that_was_not_kept_names_the_interval(tmp_path: Path) -> None:
    script = Script(tmp_path / "t", num_blocks=900, interval="0")
    first = make_prompt(1, 1500)
    script.serve(first)
    made = _explain(script, script.serve([*first[:1200], *make_prompt(2, 200)]))
    assert _check_sum(made)["window_not_retained"] == 1184
    remedy = made.spans[0].remedy
    assert remedy is not None
    assert (remedy.kind, remedy.interval, remedy.cached_tokens) == ("interval", 1024, 1024)


def test_a_partial_checkpoint_says_so_and_names_the_interval(tmp_path: Path) -> None:
    script = Script(tmp_path / "t", num_blocks=900, hf_config=SMALL_V41)
    first = make_prompt(1, 1500)
    script.serve(first)
    made = _explain(script, script.serve([*first[:600], *make_prompt(2, 60)]))
    # A chunk ends at 512, and 448 is 1,024 tokens before the end.
    assert made.checkpoints == made.partial_checkpoints == [448, 512]
    assert made.cached_tokens == 448
    reasons = _check_sum(made)
    assert (reasons["window_partial"], reasons["window_not_retained"]) == (64, 64)
    remedy = made.spans[0].remedy
    assert remedy is not None
    assert (remedy.kind, remedy.cached_tokens) == ("interval", 512)
    assert "of lower layers alone at 448, 512" in "\n".join(format_explanation(made))


def test_what_was_evicted_says_when_and_names_the_pool(tmp_path: Path) -> None:
    script = Script(tmp_path / "t", num_blocks=260, interval="0")
    first = make_prompt(1, 1000)
    script.serve(first)
    for seed in range(2, 40):
        script.serve(make_prompt(seed, 1500))
    made = _explain(script, script.serve(first))
    reasons = _check_sum(made)
    assert made.cached_tokens == 0
    assert reasons.keys() <= {"evicted", "window_evicted", "first_seen", "above_last_boundary"}
    lost = [span for span in made.spans if span.lost is not None]
    assert lost
    assert lost[0].lost is not None
    assert lost[0].lost["cause"] == "its memory was needed"
    assert 0 < lost[0].lost["requests_admitted_since"] <= 38


def test_a_bypass_says_what_to_leave_out(tmp_path: Path) -> None:
    script = Script(tmp_path / "t", num_blocks=600)
    first = make_prompt(1, 320)
    script.serve(first)
    made = _explain(script, script.serve(first, prompt_logprobs=1))
    assert _check_sum(made) == {"bypassed": 288, "above_last_boundary": 32}
    assert made.spans[0].remedy is not None
    assert made.spans[0].remedy.cached_tokens == 288


def test_nothing_is_told_of_others(tmp_path: Path) -> None:
    script = Script(tmp_path / "t", num_blocks=260)
    ids = [script.serve(make_prompt(seed, 900)) for seed in (*range(1, 12), 1)]
    text = json.dumps(to_json(_explain(script, ids[-1])))
    names = [request_id.split("-0-")[0] for request_id in ids]
    assert names[-1] in text
    assert not any(f'"{name}"' in text for name in names[:-1])


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> CacheTrace:
    """A run with many misses."""
    path = tmp_path_factory.mktemp("busy") / "t.jsonl"
    RecordedRun(path, small_settings(num_blocks=300, interval="0"), seed=9).run(45)
    return read_trace(path)


@pytest.mark.slow
def test_every_remedy_holds_when_it_is_applied(busy: CacheTrace) -> None:
    """The run is replayed anew with each remedy, and exactly the promised tokens hit."""
    explainer = Explainer(busy)
    base = ExactTwin(busy).run()
    replays: dict[tuple[str, int], dict[int, int]] = {}
    kinds: dict[str, int] = {}
    for number, stats in base.misses.items():
        for reason, missed in stats.miss_tokens.items():
            if reason == "first_seen" and kinds.get("edit", 0) >= 4:
                continue
            find = explainer.counterfactuals.find
            remedy = find(number, reason, missed, stats.num_cached_tokens)
            if remedy is None:
                continue
            kinds[remedy.kind] = kinds.get(remedy.kind, 0) + 1
            assert remedy.cached_tokens > stats.num_cached_tokens
            value = remedy.interval or remedy.num_blocks
            if value is None:
                continue
            key = (remedy.kind, value)
            if key not in replays:
                settings = explainer.counterfactuals.settings(*key)
                replays[key] = ExactTwin(busy, settings).run().cached_tokens
            assert replays[key][number] == remedy.cached_tokens
    assert kinds.keys() & {"interval", "pool"}


def test_the_command_prints_an_explanation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(tmp_path / "t", num_blocks=600)
    first = make_prompt(1, 500)
    script.serve(first)
    name = script.serve(first).split("-0-")[0]
    script.run.scheduler.shutdown()
    assert main(["cache", "explain", name, "--trace", str(script.path)]) == 0
    out = capsys.readouterr().out
    assert f"{name}: 480 of 500 hit (96.0%)" in out
    assert "480..500: above_last_boundary (20 tokens)" in out
    assert main(["cache", "explain", "r-99", "--trace", str(script.path)]) == 2
    assert "'r-99' is not in the trace" in capsys.readouterr().err


def test_two_requests_of_a_record_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(tmp_path / "t", num_blocks=600)
    first = make_prompt(1, 500)
    one = script.serve(first)
    edited = script.serve([*first[:200], 999, *first[201:]])
    longer = script.serve([*first, *make_prompt(2, 200)])
    script.run.scheduler.shutdown()
    places = {edited: (192, 224), longer: (480, None)}
    for name, (shared, parts_before) in places.items():
        flags = ["--trace", str(script.path), "--no-remedies"]
        assert main(["cache", "explain", name, one, *flags, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["comparison"]
        assert one.startswith(told["earlier"])
        assert told["shared_tokens"] == shared
        assert told["parts_before"] == parts_before
        assert main(["cache", "explain", name, one, *flags]) == 0
        assert f"compared with {told['earlier']}" in capsys.readouterr().out
    assert main(["cache", "explain", one, "nobody", *flags]) == 2
