"""An engine that is one of two ranks, its decode steps replayed: what a process of a test runs.

Both engines schedule alike, so their workers take the same steps, which is what a rank needs.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.accelerators.asking import Answers, ask, find_few_kernels
from tests.accelerators.graph_recorder import GraphRecorder, Recording
from tests.accelerators.interpreting import remember
from vllm.distributed.parallel_state import WorkerPlace
from vllm.gpu.step_model import make_graphed_step_model
from vllm.platforms.cuda import CudaReferencePlatform
from vllm.v1.executor import uniproc_executor
from vllm.v1.worker import gpu_worker

SIZE = 2
UNITS = {"qwen3-next": (16, 1), "deepseek-v4": (32, 0)}
"""Checkpoint -> ``--block-size``, drafts by the model's own block."""
LENGTHS = (35,)
"""Of the prompts."""


def answer_as_rank(rank: int, folder: Path) -> None:
    """Serves the checkpoints in a folder; leaves answers and numbers of replays in a file."""
    remember()
    os.environ["VLLM_CUDA_REFERENCE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    num_replays = 0
    replay = Recording.replay

    def count(self: Recording) -> None:
        nonlocal num_replays
        num_replays += 1
        replay(self)

    def record(model: Any, layout: Any, caches: Any, device: Any, _: Any, **settings: Any) -> Any:
        return make_graphed_step_model(
            model, layout, caches, device, GraphRecorder(model, caches), **settings
        )

    # A process of its own: nobody else sees these.
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Recording, "replay", count)
        patches.setattr(CudaReferencePlatform, "make_graph_device", lambda _: GraphRecorder())
        patches.setattr(gpu_worker, "make_graphed_step_model", record)
        patches.setattr(CudaReferencePlatform, "get_op", lambda _, name: find_few_kernels(name))
        found: dict[str, tuple[Answers, int]] = {}
        for name, (unit, num_drafts) in UNITS.items():
            place = WorkerPlace(rank, SIZE, rank, SIZE, f"file://{folder}/{name}.meeting")
            patches.setattr(uniproc_executor, "ALONE", place)
            num_replays = 0
            answers = ask(folder / name, unit, num_drafts, lengths=LENGTHS, max_num_seqs=1)
            found[name] = answers, num_replays
    (folder / f"{rank}.json").write_text(json.dumps(found))
