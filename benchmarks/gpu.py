"""Proof and figures of the GPU kernels, on a bare torch and triton: ``make gpu-check``.

    python -m benchmarks.gpu check        kernels and whole families against the CPU
    python -m benchmarks.gpu bench        kernels and models against the card's limits
    python -m benchmarks.gpu compile      every checked kernel for a card this machine may lack

Needs no network, no checkpoint and, of the engine's dependencies, only torch, triton, numpy and
safetensors. Writes one JSON (--output) and a table. With VLLM_CUDA_REFERENCE=1 ``check`` runs on
CPU tensors in Triton's interpreter, which is how the script itself is tried; ``bench`` needs a GPU.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if os.environ.get("VLLM_CUDA_REFERENCE") == "1":
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton

from vllm.gpu.decode_graphs import CudaGraphDevice, choose_sizes
from vllm.gpu.step_model import make_gpu_step_model, make_graphed_step_model, reads_pages
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.attention.ops import decoder, reference
from vllm.v1.attention.ops.registry import get_reference_op
from vllm.v1.attention.ops.triton import launch as launching
from vllm.v1.attention.ops.triton.registry import get_triton_op
from vllm.v1.attention.step_model import StepModel, make_torch_step_model
from vllm.v1.attention.step_tables import BlockTableView, RequestSlice
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

IS_INTERPRETED = launching.IS_INTERPRETED
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


# -- kernels ----------------------------------------------------------------------------------


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns fixed random numbers on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def move(node: Any, device: torch.device) -> Any:
    """Returns nested tuples with every tensor copied to a device."""
    if isinstance(node, torch.Tensor):
        return node.clone().to(device)
    return tuple(move(item, device) for item in node) if isinstance(node, tuple) else node


def make_cases(dtype: torch.dtype, rows: int) -> dict[str, tuple[Any, ...]]:
    """Returns op -> arguments, of sizes that models have (few rows where they are interpreted)."""
    scale = 1 if IS_INTERPRETED else 8
    width, heads = 64 * scale, 4
    x = draw(rows, heads, width, dtype=dtype)
    keys = draw(2, 1, 40 * scale + 3, width, seed=2, dtype=dtype)
    turns = torch.polar(torch.ones(rows, 1, width // 4), draw(rows, 1, width // 4, seed=3))
    streams = draw(rows, 4, width, seed=4, dtype=dtype)
    logits = draw(rows, 16, seed=5) * 4
    ids, weights = decoder.choose_by_softmax(logits, 4, True)
    mix = reference.sinkhorn(draw(rows, 4, 4), 5, 1e-6, *reference.sinkhorn_sums(4, 1e-6))
    queries = draw(2, heads, rows, width, seed=6, dtype=dtype)
    shared = draw(2, 40 * scale, width, seed=7, dtype=dtype)
    gate_up = draw(17, 48, width, seed=8, dtype=dtype) * width**-0.5
    down = draw(17, width, 24, seed=9, dtype=dtype) * 0.2
    cases: dict[str, tuple[Any, ...]] = {
        "rms_norm": (x, draw(width, dtype=dtype), 1e-6),
        "rms_norm_offset": (x, draw(heads, width, dtype=dtype), 1e-6),
        "rotate_halves": (x, draw(rows, 1, width, dtype=dtype), draw(rows, 1, width, dtype=dtype)),
        "rotate_": (x, turns),
        "silu_and_mul": (x.flatten(1),),
        "gelu_tanh_and_mul": (x.flatten(1),),
        "clamped_glu_and_mul": (x.flatten(1), 1.702, 7.0),
        "soft_cap_": (logits, 3.0),
        "hc_project": (streams, draw(24, 4 * width) * 0.05, draw(24), draw(24, seed=1), 1e-6),
        "sinkhorn": (draw(rows, 4, 4), 5, 1e-6, *reference.sinkhorn_sums(4, 1e-6)),
        "hc_collapse": (streams, draw(rows, 4)),
        "hc_expand": (streams[:, 0].contiguous(), streams, draw(rows, 4), mix),
        "compress_windows": (draw(rows, 4, 4 * width), draw(rows, 4, 4 * width, seed=1), None),
        "router_scores": (logits,),
        "choose_by_softmax": (logits, 4, True),
        "attend_keys": (queries, keys, keys.flip(2), None, False, width**-0.5, 0.0),
        "index_scores": (queries.transpose(1, 2), shared, draw(2, rows, heads, dtype=dtype)),
        "select_entries": (draw(2, rows, 40 * scale).round(), 17),
        "mix_experts": (x[:, 0].contiguous(), gate_up, down, ids, weights, 7.0),
        "project_to_logits": (x[:, 0].contiguous(), draw(300, width, seed=3, dtype=dtype)),
        "router_logits": (x[:, 0].contiguous(), draw(16, width), draw(16)),
    }
    with_sink = shared.clone()
    with_sink[:, 0] = 0
    scaled = queries.transpose(1, 2).contiguous() * width**-0.5
    cases["attend"] = (scaled, with_sink, None, draw(heads))
    return cases


def check_kernels(device: torch.device) -> dict[str, float]:
    """Compares every op's kernel with the reference in fp32 on the CPU.

    Returns:
        "op dtype rows" -> relative distance.

    Raises:
        AssertionError: One is beyond its bound, or no number.
    """
    distances: dict[str, float] = {}
    for dtype in BOUNDS:
        for rows in (1, 5) if IS_INTERPRETED else (1, 17, 256):
            for name, args in make_cases(dtype, rows).items():
                found = get_triton_op(name)(*move(args, device))
                wide = tuple(
                    item.float() if isinstance(item, torch.Tensor) and item.dtype == dtype else item
                    for item in move(args, torch.device("cpu"))
                )
                # Whole choices and whole types as they are; the rest in fp32.
                expected = get_reference_op(name)(*wide)
                pairs = zip(_as_tuple(found), _as_tuple(expected), strict=True)
                worst = max(_distance(left.cpu(), right) for left, right in pairs)
                distances[f"{name} {_short(dtype)} {rows}"] = worst
                assert worst <= BOUNDS[dtype], f"{name} {dtype} with {rows} rows: off by {worst}"
    return distances


def _as_tuple(node: Any) -> tuple[torch.Tensor, ...]:
    return node if isinstance(node, tuple) else (node,)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    if not found.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    difference = (found.double() - expected.double()).norm()
    worst = float(difference / expected.double().norm().clamp_min(1e-9))
    return worst if worst == worst else float("inf")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- models -----------------------------------------------------------------------------------

_TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 33,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "attention_bias": True,
    },
    "deepseek-v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 8,
        "sliding_window": 128,
        "compress_ratios": [0, 4, 128, 0],
        "index_n_heads": 12,
        "index_head_dim": 16,
        "index_topk": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_hash_layers": 1,
        "hc_mult": 4,
        "num_nextn_predict_layers": 0,
        "compress_rope_theta": 160000.0,
    },
}


def build_model(raw: dict[str, Any], dtype: torch.dtype, device: torch.device, ops: Any) -> Any:
    """Builds a model with random weights, the same on every device."""
    entry = resolve_model(raw["architectures"])
    model = entry.load_model_class()(entry.parse_config(raw), ops=ops, dtype=dtype, device=device)
    is_big = raw["hidden_size"] > 512
    with torch.no_grad():
        for index, (name, slot) in enumerate(sorted(model.weight_slots().items())):
            if slot.dtype == torch.int64:
                slot.copy_(torch.arange(slot.numel()).view(slot.shape) % 8)
                continue
            spread = 1.0 if "embed" in name else 1.3 * slot.shape[-1] ** -0.5
            if is_big:
                # Where it only has to be timed, the device draws.
                slot.normal_(0.0, 0.05)
                continue
            values = draw(*slot.shape, seed=index) * spread
            if "norm" in name and not raw["model_type"].startswith("gemma"):
                values = 1 + 0.2 * values
            slot.copy_(values)
    return model.eval()


class Pages:
    """A model with pages of its own; requests take blocks in order and keep them.

    Args:
        raw: config.json.
        model: The model.
        device: Where it is.
        num_blocks: Blocks of each group.
        max_requests: Of a decode step that is replayed; 0: none is.
    """

    def __init__(
        self,
        raw: dict[str, Any],
        model: Any,
        device: torch.device,
        num_blocks: int,
        max_requests: int,
    ) -> None:
        entry = resolve_model(raw["architectures"])
        self.model, self.device = model, device
        size = 32
        dtype = next(model.parameters()).dtype
        specs: dict[str, KVCacheSpec] = entry.load_kv_cache_specs()(
            model.config, size, dtype, torch.float32
        )
        alike: dict[KVCacheSpec, list[str]] = {}
        for name, spec in specs.items():
            alike.setdefault(spec, []).append(name)
        groups = [KVCacheGroupSpec(names, spec) for spec, names in alike.items()]
        self.layout = CacheLayout.from_kv_cache_config(KVCacheConfig(1, [], groups))
        self.caches = {name: self._make(name, spec, num_blocks) for name, spec in specs.items()}
        self._next = [1] * len(self.layout.groups)
        self._tables: dict[int, list[list[int]]] = {}
        self.lengths: dict[int, int] = {}
        self.eager = self._make_eager()
        self.steps = self.eager
        if max_requests and reads_pages(model, self.layout):
            self.steps = make_graphed_step_model(
                model,
                self.layout,
                self.caches,
                device,
                CudaGraphDevice(),
                sizes=choose_sizes(max_requests),
                max_tokens=num_blocks * size,
            )

    def _make_eager(self) -> StepModel:
        if self.device.type == "cpu" and not IS_INTERPRETED:
            return make_torch_step_model(self.model, self.device)
        return make_gpu_step_model(self.model, self.layout, self.caches, self.device)

    def _make(self, name: str, spec: Any, num_blocks: int) -> torch.Tensor:
        group = self.layout.groups[self.layout.group_of[name]]
        rows, size = group.rows_per_block, spec.dtype.itemsize
        width = spec.real_page_size_bytes // (rows * size)
        blocks = num_blocks * max(1, 32 // group.block_size)
        return torch.zeros((blocks, rows, width), dtype=spec.dtype, device=self.device)

    def step(
        self, work: Sequence[tuple[int, list[int]]], steps: StepModel | None = None
    ) -> torch.Tensor:
        """Runs (request, tokens) in one batch; returns the logits of each one's last row."""
        steps = steps or self.steps
        slices, tokens, positions, last = [], [], [], []
        for request, new in work:
            start = self.lengths.setdefault(request, 0)
            tables = self._tables.setdefault(request, [[] for _ in self.layout.groups])
            for index, group in enumerate(self.layout.groups):
                while len(tables[index]) * group.block_size < start + len(new):
                    tables[index].append(self._next[index])
                    self._next[index] += 1
            views = tuple(BlockTableView(0, np.array(ids, dtype=np.int64)) for ids in tables)
            slices.append(RequestSlice(start, len(new), views))
            tokens += new
            positions += range(start, start + len(new))
            last.append(len(tokens) - 1)
            self.lengths[request] = start + len(new)
        with torch.inference_mode():
            meta = steps.build_metadata(slices, self.layout)
            streams = steps.model(
                torch.tensor(tokens, device=self.device),
                torch.tensor(positions, device=self.device),
                meta,
                self.caches,
            )
            logits: torch.Tensor = steps.model.compute_logits(
                streams[torch.tensor(last, device=self.device)]
            )
        return logits


def generate(pages: Pages, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Returns greedy answers: prompts in chunks one by one, then all decode together."""
    answers: list[list[int]] = []
    for request, prompt in enumerate(prompts):
        half = len(prompt) // 2
        pages.step([(request, prompt[:half])])
        logits = pages.step([(request, prompt[half:])])
        answers.append([int(logits.argmax())])
    for _ in range(num_tokens - 1):
        logits = pages.step([(r, [answer[-1]]) for r, answer in enumerate(answers)])
        for answer, token in zip(answers, logits.argmax(-1).tolist(), strict=True):
            answer.append(token)
    return answers


def check_families(device: torch.device) -> dict[str, str]:
    """Compares greedy tokens in fp32 with the CPU's reference ops; graphs where there is a GPU.

    Raises:
        AssertionError: A token differs.
    """
    cpu, results = torch.device("cpu"), {}
    lengths, num_tokens = ((5, 20), 2) if IS_INTERPRETED else ((7, 300, 131), 24)
    for family, own in FAMILIES.items():
        raw = {**_TINY, **own}
        prompts = [
            torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist()
            for n in lengths
        ]
        answers = []
        for where, ops in ((cpu, get_reference_op), (device, get_triton_op)):
            model = build_model(raw, torch.float32, where, ops)
            num_graphed = 4 if where.type == "cuda" else 0
            pages = Pages(raw, model, where, 64, num_graphed)
            if ops is get_reference_op:
                pages.steps = make_torch_step_model(model, cpu)
            answers.append(generate(pages, prompts, num_tokens))
        assert answers[0] == answers[1], f"{family}: {answers[1]} instead of {answers[0]}"
        results[family] = f"{len(prompts)} answers of {num_tokens} tokens equal"
    return results


def check_waits(device: torch.device) -> str:
    """Runs replayed decode steps with every wait of the host an error (a GPU only)."""
    if device.type != "cuda":
        return "no GPU: not looked at"
    raw = {**_TINY, **FAMILIES["qwen3-moe"]}
    pages = Pages(raw, build_model(raw, torch.float32, device, get_triton_op), device, 64, 4)
    pages.step([(0, [1, 2, 3])])
    with torch.inference_mode():
        slices = [
            RequestSlice(3, 1, tuple(BlockTableView(0, np.array([1])) for _ in pages.layout.groups))
        ]
        meta = pages.steps.build_metadata(slices, pages.layout)
        tokens, positions = torch.tensor([4], device=device), torch.tensor([3], device=device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            pages.steps.model.compute_logits(
                pages.steps.model(tokens, positions, meta, pages.caches)
            )
            pages.eager.model(tokens, positions, meta, pages.caches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return "no wait in a step of experts, replayed or not"


# -- figures ----------------------------------------------------------------------------------


def measure(run: Callable[[], Any], repeats: int = 20) -> float:
    """Returns the median seconds of a call, by events, after three calls nobody counts."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def bench_limits(device: torch.device) -> dict[str, float]:
    """Returns what the card copies and multiplies here."""
    source = torch.randn(1 << 29, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return {
        "copy, GB/s": 2 * source.nbytes / measure(lambda: target.copy_(source)) / 1e9,
        "bf16 product, TFLOP/s": 2 * 8192**3 / measure(lambda: left @ right) / 1e12,
    }


QWEN3_SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
QWEN3_4B = {
    **QWEN3_SMALL,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}


def bench_model(
    raw: dict[str, Any], device: torch.device, limits: dict[str, float]
) -> dict[str, Any]:
    """Returns decode and prefill of a random bf16 model against the limits."""
    model = build_model(raw, torch.bfloat16, device, get_triton_op)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    found: dict[str, Any] = {"weights, GB": num_bytes / 1e9}
    for batch in (1, 64):
        pages = Pages(raw, model, device, 64 * 40, batch)
        for request in range(batch):
            pages.step([(request, [1] * 512)], pages.eager)
        for name, steps in (("graphs", pages.steps), ("no graphs", pages.eager)):
            times = []
            for _ in range(30):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                pages.step([(request, [1]) for request in range(batch)], steps).argmax(-1).tolist()
                times.append(time.perf_counter() - begin)
            seconds = statistics.median(times[5:])
            found[f"decode, batch {batch}, {name}, tokens/s"] = batch / seconds
            if batch == 1:
                share = num_bytes / seconds / 1e9 / limits["copy, GB/s"]
                found[f"decode, batch 1, {name}, share of bandwidth"] = share
        del pages
    pages = Pages(raw, model, device, 400, 0)
    requests = iter(range(100))
    num_parameters = num_bytes / 2
    seconds = measure(lambda: pages.step([(next(requests), [1] * 4096)], pages.eager), 3)
    found["prefill of 4,096, tokens/s"] = 4096 / seconds
    rate = 2 * num_parameters * 4096 / seconds / 1e12
    found["prefill of 4,096, share of bf16 rate"] = rate / limits["bf16 product, TFLOP/s"]
    return found


def bench_transformers(raw: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns the decode of transformers' model of the same shape, where the package is there."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  (optional)
    except ImportError as error:
        return {"transformers": f"not there: {error}"}
    own = {key: value for key, value in raw.items() if key not in ("model_type", "architectures")}
    config = AutoConfig.for_model(raw["model_type"], **own)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()
    found: dict[str, Any] = {}
    for batch in (1, 64):
        prompt = torch.ones(batch, 512, dtype=torch.int64, device=device)
        seconds = []
        for num_tokens in (8, 40, 8, 40):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with torch.inference_mode():
                model.generate(
                    prompt, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
                )
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        found[f"transformers, decode, batch {batch}, tokens/s"] = (
            32 * batch / (seconds[3] - seconds[2])
        )
    return found


# -- the command ------------------------------------------------------------------------------


def describe(device: torch.device) -> dict[str, str]:
    """Returns card and versions."""
    card = torch.cuda.get_device_name() if device.type == "cuda" else "none: interpreted on a CPU"
    return {
        "card": card,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def compile_kernels(capability: int) -> dict[str, float]:
    """Compiles kernels for a card; returns kernel and its constants -> shared memory, KiB."""
    from benchmarks.gpu_compile import Compiler  # noqa: PLC0415  (reaches into triton)

    compiler = Compiler(capability)
    with launching.launching_by(compiler.launch):
        for dtype in BOUNDS:
            for name, args in make_cases(dtype, 17).items():
                get_triton_op(name)(*args)
        raw = {**_TINY, **FAMILIES["gpt-oss"]}
        cpu = torch.device("cpu")
        model = build_model(raw, torch.bfloat16, cpu, get_triton_op)
        pages = Pages(raw, model, cpu, 64, 0)
        pages.steps = make_gpu_step_model(model, pages.layout, pages.caches, cpu)
        pages.step([(0, [1] * 40)])
        pages.step([(0, [1])])
    return compiler.shared


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["check", "bench", "compile"])
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--capability", type=int, default=90, help="of compile: 80, 90, ...")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {"machine": describe(device)}
    if args.what == "compile":
        report["compiled"] = compile_kernels(args.capability)
    elif args.what == "check":
        if device.type == "cpu" and not IS_INTERPRETED:
            print("There is no GPU here; VLLM_CUDA_REFERENCE=1 checks in Triton's interpreter.")
            return 2
        report["kernels"] = check_kernels(device)
        report["families"] = check_families(device)
        report["waits"] = check_waits(device)
    else:
        if device.type == "cpu":
            print("There is no GPU here, and figures of anything else would be of no use.")
            return 2
        limits = bench_limits(device)
        report["limits"] = limits
        report["Qwen3-0.6B-shaped"] = bench_model(QWEN3_SMALL, device, limits)
        report["Qwen3-0.6B-shaped"] |= bench_transformers(QWEN3_SMALL, device)
        report["Qwen3-4B-shaped"] = bench_model(QWEN3_4B, device, limits)
    for part, values in report.items():
        print(f"\n{part}")
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            print(f"  {name:<48} {f'{value:.4g}' if isinstance(value, float) else value}")
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
