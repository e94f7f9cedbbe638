"""What is said when a device has no room: what was asked for, what is free, what to change."""

import re
from typing import Literal

from vllm.config import VllmConfig
from vllm.exceptions import DeviceMemoryError
from vllm.utils.mem_constants import GiB_bytes, KiB_bytes, MiB_bytes, format_size
from vllm.v1.worker.device_memory import DeviceMemory

Stage = Literal["load the weights", "run the largest step", "capture decode graphs", "run a step"]

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB)")
_UNITS = {"bytes": 1, "KiB": KiB_bytes, "MiB": MiB_bytes, "GiB": GiB_bytes}


def read_asked_bytes(error: BaseException) -> int | None:
    """Return what an allocator was asked for, as its error says; None: it does not."""
    found = _ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def explain_shortage(
    stage: Stage,
    error: BaseException,
    config: VllmConfig,
    device: str,
    memory: DeviceMemory | None,
) -> DeviceMemoryError:
    """Return the error to raise in an allocator's place.

    Args:
        stage: What there was no room for.
        error: The allocator's.
        config: Its flags are named with their values.
        device: The device, for people.
        memory: Tells what is free; None: nobody knows.
    """
    asked = read_asked_bytes(error)
    free, total = (None, None) if memory is None else memory.mem_get_info()
    numbers = [
        *(() if asked is None else (f"{format_size(asked)} more were asked for",)),
        *(() if free is None or total is None else (_spell_free(free, total),)),
    ]
    told = f" ({', '.join(numbers)})" if numbers else ""
    return DeviceMemoryError(
        f"The memory of {device} is too small to {stage}{told}: {_advise(stage, config)}.",
        asked,
        free,
    )


def _spell_free(free: int, total: int) -> str:
    return f"{format_size(free)} of {format_size(total)} are free"


def _advise(stage: Stage, config: VllmConfig) -> str:
    scheduler = config.scheduler_config
    step = (
        f"lower --max-num-batched-tokens ({scheduler.max_num_batched_tokens}) or --max-num-seqs "
        f"({scheduler.max_num_seqs})"
    )
    share = f"lower --gpu-memory-utilization ({config.cache_config.gpu_memory_utilization})"
    if stage == "load the weights":
        ranks = config.parallel_config.tensor_parallel_size
        return (
            "serve a smaller or quantised checkpoint, share it out by --tensor-parallel-size "
            f"({ranks}), or end what else uses the device"
        )
    if stage == "run the largest step":
        return f"{step}, or serve a smaller or quantised checkpoint"
    if stage == "capture decode graphs":
        return f"{share} or --max-num-seqs ({scheduler.max_num_seqs}), or give --enforce-eager"
    return f"{share}, or {step}; other processes may have taken what was free at start"
