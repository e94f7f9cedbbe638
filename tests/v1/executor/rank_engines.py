"""Engines over ranks that outlive them: a process of a rank takes seconds to start."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.client import InlineCore
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.process_ranks import ProcessRanks
from vllm.v1.executor.ranked_executor import RankedExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_offload.connector import OffloadingConnector

_OPEN_S = 60.0


class LentRanks:
    """Ranks for one more executor, which does not end them.

    Args:
        ranks: The processes.
        meeting: A file of their own to meet at.
    """

    def __init__(self, ranks: ProcessRanks, meeting: Path) -> None:
        self._ranks = ranks
        self.places = [replace(p, rendezvous=f"file://{meeting}") for p in ranks.places]
        self.order, self.find_fault = ranks.order, ranks.find_fault
        self.bind_wake = ranks.bind_wake

    def close(self) -> None:
        """Nothing: another executor is to come."""


def run_engine(
    prompts: Sequence[list[int]],
    ranks: LentRanks | None = None,
    *,
    together: bool = False,
    **arguments: Any,
) -> tuple[list[list[int]], list[int]]:
    """Answer prompts one after the other; tokens, and how many of each prompt were hits.

    A cache folder is open before the first prompt: nobody waits while a folder's weights are read
    for the first time, so an engine of a few prompts could end before it.

    Args:
        prompts: Token ids.
        ranks: Where the model is; None: in this process alone.
        together: Whether all are asked at once.
        arguments: Of the engine.
    """
    if ranks is not None:
        arguments["tensor_parallel_size"] = len(ranks.places)
    config = EngineArgs(**arguments).create_vllm_config()
    make: Any = UniProcExecutor
    if ranks is not None:
        make = partial(RankedExecutor, start_ranks=lambda _: ranks)

    def build() -> EngineCore:
        core = EngineCore(config, make)
        _wait_open(core.scheduler.connector)
        return core

    engine = LLMEngine(config, InlineCore(build))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    last: dict[str, Any] = {}

    def run() -> None:
        while engine.has_unfinished_requests():
            last.update({output.request_id: output for output in engine.step()})

    try:
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
            if not together:
                run()
        run()
    finally:
        engine.shutdown()
    ends = [last[str(index)] for index in range(len(prompts))]
    tokens = [list(output.outputs[0].token_ids) for output in ends]
    return tokens, [output.num_cached_tokens or 0 for output in ends]


def _wait_open(connector: Any) -> None:
    if not isinstance(connector, OffloadingConnector):
        return
    assert connector._tier is not None
    keeper = connector._tier.stores.keeper
    deadline = time.monotonic() + _OPEN_S
    while keeper is not None and keeper.is_opening:
        assert time.monotonic() < deadline
        time.sleep(0.002)
