"""Compiles what the sections of ``benchmarks.gpu`` launch, with all processors, before they run.

    python -m benchmarks.gpu_ahead [--target cuda:90] [--limit-s 150]

Compiled one after the other, as they are launched, they would take most of the time that a card is
lent for. The sections' steps run on tensors without memory here; each launch is handed to one of as
many processes as there are processors, once, and the sections find the kernels in Triton's cache.
Whatever is not compiled by then, is when it is launched.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import Any

import torch
from triton.runtime import driver

from benchmarks import gpu, gpu_packed
from benchmarks.gpu_compile import META, Card, Rehearsal, describe_arg, run_ops, run_rest
from vllm.gpu.step_model import can_replay, make_graphed_step_model
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.attention.ops.triton import launch as launching
from vllm.v1.attention.ops.triton.registry import get_triton_op

_DTYPES = (torch.float32, torch.bfloat16)


# -- what is compiled -------------------------------------------------------------------------


def _compile(
    module: str, name: str, args: list[Any], grid: tuple[int, ...], options: dict[str, Any]
) -> float:
    """Compiles one launch in a process of the pool; returns the seconds it took."""
    begin = time.perf_counter()
    kernel = getattr(importlib.import_module(module), name)
    # Only types count: tensors have none of the values.
    made = [
        torch.empty(1, dtype=arg, device=META) if isinstance(arg, torch.dtype) else arg
        for arg in args
    ]
    kernel.warmup(*made, grid=grid, **options)
    return time.perf_counter() - begin


def _become(target: str) -> None:
    driver.set_active(Card(target))


class Dispatcher:
    """A ``Launcher`` that hands each launch that a card would compile to a pool, once.

    Attributes:
        pending: By kernel, types and constants.
    """

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool
        self.pending: dict[str, Future[float]] = {}

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Have a kernel compiled for these arguments."""
        constants = [f"{name}={value}" for name, value in options.items()]
        key = " ".join([kernel.__name__, *constants, *map(describe_arg, args)])
        if key not in self.pending:
            kept = [arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args]
            self.pending[key] = self._pool.submit(
                _compile, kernel.fn.__module__, kernel.__name__, kept, grid, options
            )


# -- what is launched -------------------------------------------------------------------------


def _run_model(
    raw: dict[str, Any],
    dtype: torch.dtype,
    steps: list[list[int]],
    most: int,
    num_drafts: int = 0,
    *,
    has_block: bool = False,
) -> None:
    """Runs steps of a model, given as the tokens of each request, and captures decode steps."""
    entry = resolve_model(raw["architectures"])
    with torch.inference_mode():
        model = entry.load_model_class()(
            entry.parse_config(raw), ops=get_triton_op, dtype=dtype, device=META
        )
        pages = gpu.Pages(raw, model, META, 64 * 40, 0)
        for number, counts in enumerate(steps):
            work = [(100 * number + r, [1] * count) for r, count in enumerate(counts)]
            if has_block:
                list(gpu.draft(pages, work, pages.eager))
            else:
                # Of the short ones all tokens but the first are drafts.
                pages.step(work, num_drafts=num_drafts if max(counts) <= 1 + num_drafts else 0)
        if not can_replay(model, pages.layout):
            return
        make_graphed_step_model(
            model,
            pages.layout,
            pages.caches,
            META,
            Rehearsal(),
            sizes=gpu.choose_sizes(most),
            max_tokens=gpu.MOST_TOKENS,
            num_drafts=num_drafts,
            has_block=has_block,
        )


def _run_family(family: str) -> None:
    raw = {**gpu.TINY, **gpu.FAMILIES[family]}
    steps = [[3], [4], [150], [65], [66], [1], [1, 1, 1]]
    _run_model(raw, torch.float32, steps, 4, gpu.NUM_DRAFTS)


def _run_invariance(family: str) -> None:
    raw = {**gpu.TINY, **gpu.FAMILIES[family]}
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    try:
        _run_model(raw, torch.bfloat16, [[5], [20], [1], [1] * 21], 4)
    finally:
        del os.environ["VLLM_BATCH_INVARIANT"]


def _run_packed(form: str) -> None:
    for width, dtypes in ((2048, _DTYPES), (8192, (torch.bfloat16,))):
        source = gpu_packed.make_source(form, 128, width, torch.device("cpu"))
        for dtype in dtypes:
            for rows in (1, 40):
                get_triton_op("stored_linear")(torch.zeros(rows, width, dtype=dtype), source)


def _shorten(raw: dict[str, Any], num_layers: int) -> dict[str, Any]:
    return {**raw, "num_hidden_layers": num_layers}


def list_rehearsals() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what the sections launch, those first that run first."""
    for dtype in _DTYPES:
        yield f"kernels {dtype}", lambda dtype=dtype: run_ops(dtype)  # type: ignore[misc]
    for form in gpu_packed.FORMS:
        yield f"packed {form}", lambda form=form: _run_packed(form)  # type: ignore[misc]
    for family in gpu.FAMILIES:
        yield f"family {family}", lambda family=family: _run_family(family)  # type: ignore[misc]
    yield "draws", lambda: run_rest(torch.float32)
    timed = {
        "small": _shorten(gpu.QWEN3_SMALL, 1),
        "large": _shorten(gpu.QWEN3_4B, 1),
        "gemma": _shorten(gpu.GEMMA_4B, 6),
        "v4": gpu.V4_SMALL,
    }
    for name, raw in timed.items():
        steps = [[512], [1], [1] * 64, [4096]]
        drafts = gpu.NUM_DRAFTS if name == "small" else 0
        yield (
            name,
            lambda raw=raw, steps=steps, drafts=drafts: _run_model(  # type: ignore[misc]
                raw, torch.bfloat16, steps, 64, drafts
            ),
        )
    drafting = gpu.V4_SMALL | {"num_nextn_predict_layers": 1}
    rows = 1 + gpu.NUM_DRAFTS
    yield (
        "v4 drafts",
        lambda: _run_model(
            drafting,
            torch.bfloat16,
            [[512], [rows], [rows] * 64],
            64,
            gpu.NUM_DRAFTS,
            has_block=True,
        ),
    )
    for family in gpu.INVARIANT_FAMILIES:
        yield f"invariance {family}", lambda family=family: _run_invariance(family)  # type: ignore[misc]


# -- the command ------------------------------------------------------------------------------


def compile_ahead(
    target: str, limit_s: float, only: str = "", num_processes: int | None = None
) -> dict[str, Any]:
    """Compile for a card.

    Args:
        target: Such as "cuda:90".
        limit_s: Seconds after which what is not begun is left out.
        only: Beginning of the names of what is compiled.
        num_processes: Of the pool; None: as many as there are processors.

    Returns:
        How many kernels were compiled and what that took; "wrong" -> what failed.
    """
    begin = time.perf_counter()
    wrong: dict[str, str] = {}
    _become(target)
    processes = multiprocessing.get_context("spawn")
    count = num_processes or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(count, processes, _become, (target,)) as pool:
        dispatcher = Dispatcher(pool)
        for name, run in list_rehearsals():
            if not name.startswith(only):
                continue
            try:
                with launching.launching_by(dispatcher.launch):
                    run()
            except Exception as error:  # one of them must not hide the others
                wrong[name] = f"{type(error).__name__}: {error}"
        listed = time.perf_counter() - begin
        wait(dispatcher.pending.values(), max(0.0, limit_s - listed))
        for future in dispatcher.pending.values():
            future.cancel()
    seconds = 0.0
    left = 0
    for key, future in dispatcher.pending.items():
        if future.cancelled():
            left += 1
        elif error := future.exception():
            wrong[key] = f"{type(error).__name__}: {str(error)[-500:]}"
        else:
            seconds += future.result()
    return {
        "kernels": len(dispatcher.pending),
        "left out": left,
        "seconds until listed": round(listed, 1),
        "seconds of processors": round(seconds, 1),
        "processes": count,
        "wrong": wrong,
    }


def main() -> int:
    """Compile; the exit status and the last line are those of a section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="default: the card that is there")
    parser.add_argument("--limit-s", type=float, default=150.0)
    parser.add_argument("--only", default="", help="beginning of the names of what is compiled")
    args = parser.parse_args()
    target = args.target
    if target is None:
        if not torch.cuda.is_available():
            print("There is no GPU here; --target names one.")
            return 2
        major, minor = torch.cuda.get_device_capability()
        target = f"cuda:{10 * major + minor}"
    machine = gpu.describe(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    results = compile_ahead(target, args.limit_s, args.only)
    print(json.dumps({"machine": machine, "results": results}))
    return 1 if results["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
