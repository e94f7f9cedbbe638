"""Compiles every kernel for cards that this machine does not have, as launches would compile it.

    python -m benchmarks.gpu_compile [--target cuda:90 ...] [--only qwen3 ...] [--output FILE]
    python -m benchmarks.gpu_compile --quick     only what Triton's own checks say, ten times faster

Steps of models with the widths of releases run on tensors without memory: what they launch is
compiled, nothing is computed, and whatever would have the host wait for the device fails, since
there is no value to wait for. A report names, for each kernel, the shared memory of a block, the
registers of a thread, and the bytes that did not fit in registers.

What compiles here may still be wrong or slow on a card.
"""

import argparse
import contextlib
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks import gpu, gpu_packed
from vllm.gpu.step_model import can_replay, make_graphed_step_model
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.attention.ops.triton import launch as launching
from vllm.v1.attention.ops.triton import pages as paging
from vllm.v1.attention.ops.triton.registry import TRITON_OPS, get_triton_op
from vllm.v1.attention.ops.triton.sampling import draw_rows

META = torch.device("meta")
# Shared memory that one block may have, KiB: A100, cards with the same kernels and less (8.6, 8.9,
# 12.0), H100 and H200, MI300.
SHARED_KIB = {"cuda:80": 163, "cuda:86": 99, "cuda:89": 99, "cuda:90": 227, "cuda:100": 227}
SHARED_KIB |= {"cuda:120": 99, "hip:gfx942": 64}
_AMD_WARP, _NVIDIA_WARP = 64, 32
# Bytes: Triton makes other programs of pointers to multiples of it.
_ALIGNMENT = 16


class Card:
    """Stands where triton's driver does: it knows what it compiles for, and launches nothing."""

    def __init__(self, target: str) -> None:
        # Kernels keep what was compiled by device.
        self._device = list(SHARED_KIB).index(target)
        backend, arch = target.split(":")
        is_amd = backend == "hip"
        self._target = GPUTarget(
            backend, arch if is_amd else int(arch), _AMD_WARP if is_amd else _NVIDIA_WARP
        )

    def get_current_target(self) -> GPUTarget:
        """Return the card."""
        return self._target

    def get_current_device(self) -> int:
        """Return a number of the card's own."""
        return self._device

    def get_current_stream(self, device: int) -> int:
        """Return the default one."""
        return device


def stop_after_checks(
    backend: Any = None,
    stages: dict[str, Callable[..., Any]] | None = None,
    options: Any = None,
    language: Any = None,
    capability: Any = None,
) -> tuple[str, str] | None:
    """Leave out what follows Triton's own intermediate code; Triton's hook of that name.

    Without arguments it is asked for what tells such kernels from others in the cache.
    """
    del backend, options, language, capability
    if stages is None:
        return "checked", "checked"
    first, *_, last = stages
    for name in [name for name in stages if name not in (first, last)]:
        del stages[name]

    def finish(_: Any, metadata: dict[str, Any]) -> bytes:
        metadata.update(name="checked", shared=0)
        return b""

    stages[last] = finish
    return None


@dataclass(slots=True)
class Compiled:
    """What is known of one compiled kernel.

    Attributes:
        constants: Its constants, and the types of its arguments.
        program: Names what was compiled: the same for arguments that one program serves.
        seconds: Of compiling it.
        shared_kib: Shared memory of a block.
        registers: Of a thread; 0: not told.
        spilled: Bytes of a thread that are in memory because registers were short.
    """

    kernel: str
    constants: str
    seconds: float
    program: str
    shared_kib: float = 0.0
    registers: int = 0
    spilled: int = 0


@dataclass(slots=True)
class Compiler:
    """A ``Launcher`` that compiles instead of running; results are left as they were.

    Attributes:
        compiled: By kernel, types and constants.
        failed: Likewise -> what the compiler said.
    """

    target: str
    compiled: dict[str, Compiled] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Compile a kernel for these arguments, once; as the first launch of it would."""
        self.failed.update(find_moving_tables(kernel, args))
        described = " ".join(
            [*(f"{name}={value}" for name, value in options.items()), *map(describe_arg, args)]
        )
        key = f"{kernel.__name__} {described}"
        if key in self.compiled or key in self.failed:
            return
        begin, log = time.perf_counter(), io.StringIO()
        try:
            with contextlib.redirect_stdout(log):
                made = kernel.warmup(*args, grid=grid, **options)
        except Exception as error:  # one kernel must not hide what becomes of the others
            self.failed[key] = f"{type(error).__name__}: {str(error)[-2000:]}"
            return
        seconds = round(time.perf_counter() - begin, 2)
        found = Compiled(kernel.__name__, described, seconds, made.hash)
        found.shared_kib = made.metadata.shared / 1024
        said = log.getvalue()
        if match := re.search(r"Used (\d+) registers", said):
            found.registers = int(match[1])
        if match := re.search(r"(\d+) bytes spill stores", said):
            found.spilled = int(match[1])
        self.compiled[key] = found


def find_moving_tables(kernel: Any, args: Sequence[Any]) -> dict[str, str]:
    """Returns the tables of a launch that would be compiled again for where they begin.

    Those are parts of larger ones that begin elsewhere in the next step; what is compiled then,
    has requests wait for seconds.
    """
    return {
        f"{kernel.__name__} {param.name}": "a table that begins anywhere; the kernel's alignment is"
        " that of its first launch, and others compile another"
        for param, arg in zip(kernel.params, args, strict=False)
        if isinstance(arg, torch.Tensor)
        and arg.dtype in (torch.int32, torch.int64)
        and arg.data_ptr() % _ALIGNMENT
        and not param.do_not_specialize_on_alignment
    }


def describe_arg(arg: Any) -> str:
    """Returns what a launch's key has of an argument."""
    if isinstance(arg, torch.Tensor):
        return "*" + str(arg.dtype).removeprefix("torch.")
    if isinstance(arg, float):
        return "float"
    if arg == 1:
        return "1"
    return ("int64" if arg >> 31 else "int32") + ("/16" if arg % 16 == 0 else "")


@contextlib.contextmanager
def compiling_for(target: str) -> Iterator[Compiler]:
    """Have launches compile for a card, e.g. "cuda:90" or "hip:gfx942".

    No kernel can be launched in this process afterwards.
    """
    knobs.nvidia.dump_ptxas_log = True
    driver.set_active(Card(target))
    compiler = Compiler(target)
    with launching.launching_by(compiler.launch):
        yield compiler


# -- what is launched -------------------------------------------------------------------------

_RELEASED: dict[str, dict[str, Any]] = {
    "qwen3": {**gpu.QWEN3_4B, "num_hidden_layers": 1},
    "qwen3-moe": {
        "hidden_size": 2048,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "vocab_size": 151936,
    },
    "gemma3": {**gpu.GEMMA_4B, "num_hidden_layers": 2, "sliding_window_pattern": 2},
    "gpt-oss": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "vocab_size": 201088,
    },
    "gemma4": {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "vocab_size": 262144,
        "sliding_window": 512,
    },
    "qwen3.5": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "vocab_size": 248320,
        "mtp_num_hidden_layers": 1,
    },
    "kimi-linear": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "vocab_size": 163840,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "glm": {
        "text_config": {
            **gpu.FAMILIES["glm"]["text_config"],
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 256,
            "v_head_dim": 256,
            "n_routed_experts": 288,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "linear_head_dim": 128,
            "linear_num_heads": 64,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "vocab_size": 154880,
        },
    },
    "deepseek-v4": {
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048,
        "vocab_size": 129280,
    },
}
_TYPES = (torch.bfloat16, torch.float32)


class Rehearsal:
    """A ``GraphDevice`` that captures nothing: the step runs once."""

    def capture(
        self, run: Callable[[], torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> tuple["Rehearsal", torch.Tensor]:
        """Run the step."""
        del buffers
        return self, run()

    def replay(self) -> None:
        """Do nothing."""

    def allocated_bytes(self) -> int:
        """Nothing is."""
        return 0

    def release(self) -> None:
        """Nothing is held."""


def _read_released(family: str) -> dict[str, Any]:
    return {**gpu.TINY, **gpu.FAMILIES[family], **_RELEASED[family]}


def run_family(family: str, dtype: torch.dtype) -> None:
    """Runs steps of a model of a release's widths: a prompt, beside others, drafts, decodes."""
    raw = _read_released(family)
    entry = resolve_model(raw["architectures"])
    with torch.inference_mode():
        model = entry.load_model_class()(
            entry.parse_config(raw), ops=get_triton_op, dtype=dtype, device=META
        )
        pages = gpu.Pages(raw, model, META, 1024, 0)
        pages.step([(0, [1] * 640)])
        pages.step([(0, [1] * 5), (1, [1] * 40), (2, [1])])
        pages.step([(0, [1] * 4), (1, [1])], num_drafts=3)
        pages.step([(0, [1]), (1, [1])])
        pages.step([(0, [1])])
        assert can_replay(model, pages.layout), "its decode steps are not captured"
        make_graphed_step_model(
            model,
            pages.layout,
            pages.caches,
            META,
            Rehearsal(),
            sizes=(1, 8),
            max_tokens=8192,
            num_drafts=3,
            has_block=getattr(model, "drafter", None) is not None,
        )


def run_ops(dtype: torch.dtype) -> None:
    """Runs every op that has a case, those of invariant mode too."""
    for rows in (1, 17, 256):
        for name, args in gpu.make_cases(dtype, rows).items():
            op = TRITON_OPS[name]
            for run in {op.run, op.invariant or op.run}:
                run(*gpu.move(args, META))


def run_packed(dtype: torch.dtype) -> None:
    """Runs products of all stored forms, and reads their rows."""
    for name in gpu_packed.FORMS:
        source = gpu_packed.make_source(name, 128, 256, torch.device("cpu"))
        for rows in (1, 40):
            get_triton_op("stored_linear")(torch.zeros(rows, 256, dtype=dtype), source)
        get_triton_op("read_stored_rows")(source, torch.arange(3))


def run_rest(dtype: torch.dtype) -> None:
    """Runs what no model and no op launches: draws, block copies."""
    logits = torch.zeros(3, 151936, device=META)
    for rows in (None, torch.zeros(3, dtype=torch.int64, device=META)):
        draw_rows(logits, rows, torch.zeros(5, 3, device=META))
    for width in (4096, 4099):
        paging.copy_blocks([torch.zeros(8, width, dtype=torch.int8)], [(1, 2), (2, 3)])
    del dtype


PARTS: dict[str, Callable[[torch.dtype], None]] = {
    "ops": run_ops,
    "packed": run_packed,
    "rest": run_rest,
    **{name: (lambda dtype, name=name: run_family(name, dtype)) for name in _RELEASED},  # type: ignore[misc]
}


def compile_parts(target: str, parts: Sequence[str], types: Sequence[torch.dtype]) -> Compiler:
    """Compiles what parts launch for a card; whatever ends a part stands among what failed."""
    with compiling_for(target) as compiler:
        for part in parts:
            for dtype in types:
                begin, before = time.perf_counter(), len(compiler.compiled)
                try:
                    PARTS[part](dtype)
                except Exception as error:  # one part must not hide what becomes of the others
                    compiler.failed[f"{part} {dtype}"] = f"{type(error).__name__}: {error}"
                seconds, count = time.perf_counter() - begin, len(compiler.compiled) - before
                print(f"{target} {part} {dtype}: {count} kernels, {seconds:.1f} s", file=sys.stderr)
    limit = SHARED_KIB.get(target)
    for key, found in compiler.compiled.items():
        if limit is not None and found.shared_kib > limit:
            compiler.failed[key] = f"{found.shared_kib} KiB of shared memory, of {limit}"
    return compiler


def main() -> int:
    """Compile; exits with 1 where something fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", nargs="+", default=["cuda:90"], choices=SHARED_KIB)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--types", nargs="+", choices=["bfloat16", "float32", "float16"])
    parser.add_argument("--quick", action="store_true", help="no machine code: checks alone")
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    types = [getattr(torch, name) for name in args.types] if args.types else _TYPES
    if args.quick:
        knobs.runtime.add_stages_inspection_hook = stop_after_checks
    report: dict[str, Any] = {"triton": triton.__version__, "torch": torch.__version__}
    failed = False
    for target in args.target:
        compiler = compile_parts(target, args.only, types)
        kernels = sorted(compiler.compiled.values(), key=lambda item: -item.spilled)
        report[target] = {
            "kernels": [
                {name: getattr(item, name) for name in Compiled.__slots__} for item in kernels
            ],
            "failed": compiler.failed,
        }
        failed = failed or bool(compiler.failed)
        names, programs = ({getattr(item, x) for item in kernels} for x in ("kernel", "program"))
        most = max((item.shared_kib for item in kernels), default=0.0)
        print(f"{target}: {len(programs)} programs of {len(names)} kernels, {most} KiB shared")
        for key, reason in compiler.failed.items():
            print(f"  FAILED {key}\n    {reason}")
        if args.output:
            args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
