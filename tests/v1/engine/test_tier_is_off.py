"""Without its flags an engine has nothing of the disk tier: no thread, no file, no call.

With them a step that has nothing to do for the disk asks it little.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.v1.engine.test_offloading import wait_open
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.client import InlineCore
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

# Modules: a dataclass's own functions are of no file.
_OF_TIER = ("vllm.v1.kv_offload.", "vllm.distributed.kv_transfer.")
_NUM_TOKENS = 12
_WAIT_S = 120.0
# Python functions that a quiet step calls for an open disk, whoever's they are: 108. They are 140
# where layers are walked, 178 where bad blocks are looked for, 181 with statistics in all of them.
_MOST_FOR_THE_DISK = 122


def _open_files() -> set[str]:
    folder = Path("/proc/self/fd")
    links = (entry for entry in folder.iterdir() if entry.is_symlink())
    return {os.readlink(entry) for entry in links if entry.exists()}


@dataclass(frozen=True)
class Seen:
    """What an engine was seen to do.

    Attributes:
        of_tier: Names of what it called of the tier.
        num_calls: Of each step of its last answer.
        threads: That it began.
        files: Of the folder, that it opened.
        has_connector: Whether its scheduler has one.
    """

    of_tier: list[str]
    num_calls: list[int]
    threads: set[str]
    files: set[str]
    has_connector: bool


def _count(step: Callable[[], Any], of_tier: list[str]) -> int:
    """Return how many Python functions a step calls, and note those of the tier."""
    count = 0

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        if event == "call":
            count += 1
            if frame.f_globals.get("__name__", "").startswith(_OF_TIER):
                of_tier.append(frame.f_code.co_qualname)

    sys.setprofile(see)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def _let_settle(core: EngineCore) -> None:
    """Step until the folder is open and all that was computed is on the disk."""
    wait_open(core.scheduler.connector)
    deadline = time.monotonic() + _WAIT_S
    while core.has_work():
        assert time.monotonic() < deadline
        core.step()
        time.sleep(0.001)


def _watch(folder: Path, **arguments: Any) -> Seen:
    threads, files = set(threading.enumerate()), _open_files()
    config = EngineArgs(
        model="deepseek-v4", max_model_len=512, kv_cache_memory_bytes=8 << 20, **arguments
    ).create_vllm_config()
    core = EngineCore(config, UniProcExecutor)
    engine = LLMEngine(config, InlineCore(lambda: core))
    of_tier: list[str] = []
    num_calls: list[int] = []
    params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for number in range(2):
        num_calls.clear()
        engine.add_request(str(number), {"prompt_token_ids": list(range(10, 150))}, params)
        while engine.has_unfinished_requests():
            num_calls.append(_count(engine.step, of_tier))
        if core.scheduler.connector is not None:
            _let_settle(core)
    begun = {thread.name for thread in set(threading.enumerate()) - threads}
    opened = {name for name in _open_files() - files if name.startswith(str(folder))}
    has_connector = core.scheduler.connector is not None
    engine.shutdown()
    return Seen(of_tier, num_calls, begun, opened, has_connector)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="lists open files by /proc")
def test_an_engine_without_a_tier_has_none_and_with_one_a_quiet_step_costs_little(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "cache"
    off = _watch(folder)
    assert not folder.exists()
    on = _watch(folder, prefix_cache_dir=str(folder))
    # With its flag everything looked for is found: the test sees what it says it does.
    for seen, is_on in ((off, False), (on, True)):
        assert seen.has_connector == is_on
        assert bool(seen.of_tier) == is_on, seen.of_tier
        assert any(name.startswith("prefix-cache") for name in seen.threads) == is_on
        assert bool(seen.files) == is_on
    # The quietest of the steps that do the same otherwise: other threads may have told something.
    more = [
        with_tier - without for with_tier, without in zip(on.num_calls, off.num_calls, strict=True)
    ]
    assert min(more) <= _MOST_FOR_THE_DISK
