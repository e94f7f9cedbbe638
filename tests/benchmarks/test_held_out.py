"""Made-up services are the same every time, and are replayed under every policy."""

import json
from pathlib import Path

import pytest

from benchmarks.held_out import (
    BLOCK,
    TRAIN,
    VALIDATION,
    Service,
    main,
    make_job,
    make_trace,
    measure,
)


def test_train_and_validation_have_nothing_in_common() -> None:
    assert len(TRAIN) == len(VALIDATION) == 6
    assert not TRAIN.keys() & VALIDATION.keys()


@pytest.mark.parametrize("name", ["zipf_chat", "edited_chats", "four_phases"])
def test_a_trace_is_the_same_every_time_and_in_order(name: str) -> None:
    lines = make_trace(name, 7)
    assert lines == make_trace(name, 7)
    assert lines != make_trace(name, 8)
    read = [json.loads(line) for line in lines]
    times = [line["timestamp"] for line in read]
    assert times == sorted(times)
    for line in read:
        # Whole blocks, and a last one of its own that is not full.
        assert len(line["hash_ids"]) == line["input_length"] // BLOCK + 1
        assert line["input_length"] % BLOCK


def test_what_comes_back_is_hit(tmp_path: Path) -> None:
    service = Service(1)
    shared = service.fresh(2048)
    for number in range(6):
        service.ask(number * 100.0, shared)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line + "\n" for line in service.lines()))
    # All but the first hit what they share.
    assert measure(make_job(path, "v4-flash"), "0", 64, 0.5) == pytest.approx(5 / 6, abs=0.02)


def test_traces_are_written_for_bench_replay(tmp_path: Path) -> None:
    main(["--only", "single_prompts", "--write", str(tmp_path)])
    written = (tmp_path / "single_prompts.jsonl").read_text().splitlines()
    assert written == make_trace("single_prompts", 7)
