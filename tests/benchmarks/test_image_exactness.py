"""Conversations with pictures, four ways: a short run of what benchmarks/ does with a thousand."""

from pathlib import Path

import pytest

from benchmarks.image_exactness import draw_turns, run
from tests.entrypoints.test_llm_images import write_seeing
from vllm.native.loader import load_library


def test_conversations_share_beginnings_and_show_pictures_again() -> None:
    turns = draw_turns(200, 250, 0)
    assert turns == draw_turns(200, 250, 0)
    assert len({turn.parts[:1] for turn in turns}) < 100
    assert sum(len(turn.pictures) for turn in turns) > 200
    assert max(len(turn.pictures) for turn in turns) <= 4


@pytest.mark.slow
@pytest.mark.skipif(not load_library(), reason="torch's sums depend on what runs with a request")
def test_cold_warm_restored_and_in_company_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    write_seeing("qwen35", tmp_path)
    told = run(str(tmp_path), 16, 1, 250)
    assert [told[name]["different"] for name in ("warm", "restored", "in company")] == [0, 0, 0]
    # The first conversation is found on the disk.
    assert told["restored"]["tokens hit"] > told["warm"]["tokens hit"] > 0
