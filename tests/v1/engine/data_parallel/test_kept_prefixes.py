"""Several cores over one cache folder: a restart sends each prompt where its prefix is kept."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.model_executor.models.hf_reference import random_tokens
from tests.v1.executor.rank_engines import run_engine
from vllm import LLM, SamplingParams
from vllm.v1.engine.data_parallel.router import Router, RouterSettings
from vllm.v1.engine.wire import CoreStatus

pytestmark = pytest.mark.slow

_SIZES = {"kv_cache_memory_bytes": 8 << 20, "max_model_len": 512, "block_size": 32}
_PROMPTS = [random_tokens(length, length, 500) for length in (200, 150, 300, 170)]
_PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class ListeningRouter(Router):
    """Knows whose folder it heard of: cores open theirs beside the steps."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._silent = set(range(settings.num_cores))
        ListeningRouter.is_told = threading.Event()

    is_told = threading.Event()

    def observe(self, rank: int, changes: CoreStatus, now: float | None = None) -> bool:
        """Take in what a core says, and note that it told of its folder."""
        asks = super().observe(rank, changes, now)
        if changes.kept:
            self._silent.discard(rank)
            if not self._silent:
                self.is_told.set()
        return asks


def ask(
    folder: Path, num_cores: int, order: Sequence[int], *, is_new: bool = False
) -> tuple[list[list[int]], list[int]]:
    """Return answers, and how much of each prompt was cached, by an engine that has just begun.

    Args:
        folder: What it keeps prefixes in.
        num_cores: Its cores.
        order: In which prompts are asked.
        is_new: Whether nothing is in the folder yet.
    """
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder), "max_size": "64MiB"}],
            "always_restore": True,
            "warm": 0,
        },
    }
    arguments = {**_SIZES, "kv_transfer_config": transfer, "data_parallel_size": num_cores}
    with LLM("deepseek-v4", **arguments) as llm:
        if num_cores > 1 and not is_new:
            assert ListeningRouter.is_told.wait(120), (folder, num_cores)
        # One at a time: nothing but what is kept where tells the cores apart.
        asked = [{"prompt_token_ids": _PROMPTS[i]} for i in order]
        made = [llm.generate(prompt, _PARAMS, False)[0] for prompt in asked]
    outputs = dict(zip(order, made, strict=True))
    tokens = [list(outputs[i].outputs[0].token_ids) for i in range(len(order))]
    return tokens, [outputs[i].num_cached_tokens or 0 for i in range(len(order))]


def test_cores_find_what_cores_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr("vllm.v1.engine.data_parallel.cores.Router", ListeningRouter)
    folder = tmp_path / "cache"
    expected, _ = run_engine(_PROMPTS, model="deepseek-v4", **_SIZES)
    assert ask(folder, 2, (0, 1, 2, 3), is_new=True) == (expected, [0, 0, 0, 0])
    # Whichever core computed a prompt has it now.
    assert ask(folder, 2, (1, 2, 3, 0)) == (expected, [128, 128, 256, 128])
    # One core goes on with what the first of two kept.
    tokens, alone = ask(folder, 1, (0, 1, 2, 3))
    assert tokens == expected
    assert 0 < sum(alone) < 640
    # And two with what one kept, of which the first has all.
    assert ask(folder, 2, (1, 2, 3, 0)) == (expected, [128, 128, 256, 128])
    used = sum(f.stat().st_blocks * 512 for f in folder.rglob("*") if f.is_file())
    assert used <= 64 << 20
