"""Ranks replay their decode steps, with drafts too, sums over ranks included: two processes."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tests.accelerators.asking import SHORT_V4
from tests.accelerators.rank_engine import LENGTHS, SIZE, UNITS, answer_as_rank
from tests.accelerators.test_engine import CPU, run
from tests.model_executor.models.decoder.drafting import write_drafting_model
from tests.v1.spec_decode.tiny_engine import write_tiny

pytestmark = pytest.mark.slow

__all__ = ["run"]  # the fixture


def test_ranks_answer_as_one_cpu(run: Any, tmp_path: Path) -> None:
    layers = {"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": []}
    write_drafting_model("qwen3-next", tmp_path / "qwen3-next", num_hidden_layers=2, **layers)
    write_tiny(tmp_path / "deepseek-v4", **SHORT_V4)
    processes = multiprocessing.get_context("spawn")
    ranks = [processes.Process(target=answer_as_rank, args=(r, tmp_path)) for r in range(SIZE)]
    for rank in ranks:
        rank.start()
    expected = {
        name: run(tmp_path / name, CPU, unit, num_drafts, lengths=LENGTHS)
        for name, (unit, num_drafts) in UNITS.items()
    }
    assert sum(accepted for *_, accepted in expected["qwen3-next"]), "no draft stands"
    for number, rank in enumerate(ranks):
        rank.join()
        assert rank.exitcode == 0
        found = json.loads((tmp_path / f"{number}.json").read_text())
        for name, (answers, num_replays) in found.items():
            assert [tuple(answer) for answer in answers] == expected[name], name
            assert num_replays, f"{name}: no step was replayed"
