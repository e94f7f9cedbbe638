"""Without its flags an engine has nothing of the disk tier: no thread, no file, no call."""

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.client import InlineCore
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

_OF_TIER = ("/kv_offload/", "/kv_transfer/")


def _open_files() -> set[str]:
    folder = Path("/proc/self/fd")
    links = (entry for entry in folder.iterdir() if entry.is_symlink())
    return {os.readlink(entry) for entry in links if entry.exists()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="lists open files by /proc")
@pytest.mark.parametrize("is_on", [False, True])
def test_an_engine_without_a_tier_has_none(tmp_path: Path, is_on: bool) -> None:
    folder = tmp_path / "cache"
    arguments: dict[str, Any] = {"prefix_cache_dir": str(folder)} if is_on else {}
    threads, files = set(threading.enumerate()), _open_files()
    config = EngineArgs(
        model="deepseek-v4", max_model_len=512, kv_cache_memory_bytes=8 << 20, **arguments
    ).create_vllm_config()
    core = EngineCore(config, UniProcExecutor)
    engine = LLMEngine(config, InlineCore(lambda: core))
    calls: list[str] = []

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and any(part in code.co_filename for part in _OF_TIER):
            calls.append(code.co_qualname)

    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for number in range(2):
        engine.add_request(str(number), {"prompt_token_ids": list(range(10, 150))}, params)
        sys.setprofile(see)
        try:
            while engine.has_unfinished_requests():
                engine.step()
        finally:
            sys.setprofile(None)
    begun = {thread.name for thread in set(threading.enumerate()) - threads}
    opened = {name for name in _open_files() - files if name.startswith(str(folder))}
    has_connector = core.scheduler.connector is not None
    engine.shutdown()
    # With its flag everything looked for is found: the test sees what it says it does.
    assert has_connector == is_on
    assert bool(calls) == is_on, calls
    assert any(name.startswith("prefix-cache") for name in begun) == is_on
    assert bool(opened) == is_on
    assert folder.exists() == is_on
