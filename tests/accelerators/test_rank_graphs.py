"""Ranks replay their decode steps, sums over ranks included: two processes over gloo."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tests.accelerators.asking import SHORT_V4
from tests.accelerators.rank_engine import LENGTHS, SIZE, UNITS, answer_as_rank
from tests.accelerators.test_engine import CPU, DECODERS, run
from tests.model_executor.models.decoder.checkpoints import write_model
from tests.tokenizers.family_tokenizers import byte_level
from tests.v1.spec_decode.tiny_engine import write_tiny

pytestmark = pytest.mark.slow

__all__ = ["run"]  # the fixture


def test_ranks_answer_as_one_cpu(run: Any, tmp_path: Path) -> None:
    write_model(DECODERS["qwen3-next"], tmp_path / "qwen3-next", byte_level())
    write_tiny(tmp_path / "deepseek-v4", **SHORT_V4)
    processes = multiprocessing.get_context("spawn")
    ranks = [processes.Process(target=answer_as_rank, args=(r, tmp_path)) for r in range(SIZE)]
    for rank in ranks:
        rank.start()
    expected = {
        name: run(tmp_path / name, CPU, unit, lengths=LENGTHS) for name, unit in UNITS.items()
    }
    for number, rank in enumerate(ranks):
        rank.join()
        assert rank.exitcode == 0
        found = json.loads((tmp_path / f"{number}.json").read_text())
        for name, (answers, num_replays) in found.items():
            assert [tuple(answer) for answer in answers] == expected[name], name
            assert num_replays, f"{name}: no step was replayed"
