"""Proof and figures of the GPU kernels, on a bare torch and triton: ``make gpu-check``.

    python -m benchmarks.gpu SECTION [--short]    one section: its figures as JSON in the last line

``benchmarks.gpu_run`` runs all sections, each in a process of its own: an error of the card ends
the process that sees it. Needs no network, no checkpoint and, of the engine's dependencies, only
torch, triton, numpy and safetensors. With VLLM_CUDA_REFERENCE=1 all sections run on CPU tensors in
Triton's interpreter, which is how they are tried: with tiny sizes, and figures that mean nothing.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

if os.environ.get("VLLM_CUDA_REFERENCE") == "1":
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton

from benchmarks import gpu_packed
from vllm.gpu.decode_graphs import CudaGraphDevice, choose_sizes
from vllm.gpu.draws import draw_tokens
from vllm.gpu.entry_graphs import block_layout
from vllm.gpu.step_model import (
    can_replay,
    make_gpu_step_model,
    make_graphed_step_model,
    move_tables,
)
from vllm.model_executor.models.deepseek_v4.kv_cache import MTP_WINDOW
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.ops import decoder, reference
from vllm.v1.attention.ops.registry import get_reference_op
from vllm.v1.attention.ops.triton import launch as launching
from vllm.v1.attention.ops.triton.paged_attention import PagedRequests, ScorePlan, attend_pages
from vllm.v1.attention.ops.triton.registry import get_triton_op
from vllm.v1.attention.step_model import StepModel, make_torch_step_model
from vllm.v1.attention.step_tables import BlockTableView, RequestSlice
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.sample.filters import apply_min_p, apply_top_k, apply_top_p

IS_INTERPRETED = launching.IS_INTERPRETED
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# Relative distance of a family's logits, fp32, and a difference of two logits that decides nothing.
_FAMILY_BOUND, _TIE = 1e-3, 1e-4
# Of a request of a step with drafts; where a block makes them, one row after the other.
NUM_DRAFTS = 2
# Of a decode step that is replayed: no section's requests get longer.
MOST_TOKENS = 2048
# Of the models that are timed: prompts before decode steps, requests of a step, the prompt of
# prefill, decode steps.
_PROMPT, _BATCHES, _PREFILL, _NUM_STEPS = (
    (6, (1, 3), 40, 6) if IS_INTERPRETED else (512, (1, 64), 4096, 30)
)
_VOCAB = 300 if IS_INTERPRETED else 151936
_NUM_SLOWEST = 12


# -- kernels ----------------------------------------------------------------------------------


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns fixed random numbers on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def move(node: Any, device: torch.device) -> Any:
    """Returns nested tuples with every tensor copied to a device."""
    if isinstance(node, torch.Tensor):
        return node.clone().to(device)
    return tuple(move(item, device) for item in node) if isinstance(node, tuple) else node


def make_recurrent_cases(dtype: torch.dtype, rows: int) -> dict[str, tuple[Any, ...]]:
    """Returns the ops of recurrent layers, whose states are fp32 whatever the type."""
    keys, values = 16 if IS_INTERPRETED else 128, 24 if IS_INTERPRETED else 128
    state = draw(4, keys, values, seed=6)
    by_head = -draw(rows, 4, seed=4).abs(), draw(rows, 4, seed=5).sigmoid()
    parts = (draw(rows, 2, keys), draw(rows, 2, keys, seed=2), draw(rows, 4, values, seed=3))
    heads = draw(rows, 4, values, dtype=dtype), draw(rows, 4, values, seed=1, dtype=dtype)
    decays = draw(rows, 4, keys, dtype=dtype), draw(4, keys), draw(4, 1)
    return {
        "short_convolution": (draw(rows, 90), draw(3, 90, seed=1), draw(90, 4, seed=2)),
        "decay_logs": decays,
        "bounded_decay_logs": (*decays, 5.0),
        "gated_delta_scan": (*parts, *by_head, state),
        "gated_rms_norm": (*heads, draw(values), 1e-6, "silu"),
        "gate_heads": heads,
    }


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
    return cases | make_recurrent_cases(dtype, rows)


def check_kernels(device: torch.device, short: bool) -> dict[str, Any]:
    """Compares every op's kernel with the reference in fp32 on the CPU.

    Returns:
        "op dtype rows" -> relative distance; "wrong" -> what is beyond its bound, or failed.
    """
    distances: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    sizes = (5,) if short else (1, 5) if IS_INTERPRETED else (1, 17, 256)
    for dtype in BOUNDS:
        for rows in sizes:
            for name, args in make_cases(dtype, rows).items():
                case = f"{name} {_short(dtype)} {rows}"
                try:
                    distances[case] = distance = _compare(name, args, dtype, device)
                except Exception as error:  # one kernel must not hide what the others do
                    wrong[case] = f"{type(error).__name__}: {error}"
                    continue
                if distance > BOUNDS[dtype]:
                    wrong[case] = f"off by {distance}"
            say(device, {**distances, "wrong": wrong})
    return {**distances, "wrong": wrong}


def _compare(name: str, args: Any, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the relative distance of an op's results from the reference's in fp32."""
    found = get_triton_op(name)(*move(args, device))
    wide = tuple(
        item.float() if isinstance(item, torch.Tensor) and item.dtype == dtype else item
        for item in move(args, torch.device("cpu"))
    )
    # Whole choices and whole types as they are; the rest in fp32.
    expected = get_reference_op(name)(*wide)
    pairs = zip(_as_tuple(found), _as_tuple(expected), strict=True)
    return max(_distance(left.cpu(), right) for left, right in pairs)


def say(device: torch.device, results: dict[str, Any]) -> None:
    """Writes what is known so far: the section may run out of its time."""
    print(json.dumps({"machine": describe(device), "results": results}), flush=True)


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

TINY = {
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
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_key_value_heads": 1,
        "global_head_dim": 32,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "rope_theta": 1e6,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "sliding_window": 33,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 4,
        "rope_theta": 1e7,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
    },
    "kimi-linear": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_key_value_heads": 4,
        "model_max_length": 4096,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "glm": {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": {
            **TINY,
            "model_type": "glm5_next_text",
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 32,
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 0,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "index_topk": 64,
            "index_head_dim": 16,
            "index_n_heads": 32,
            "index_kpool": 4,
            "layer_types": ["linear_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "tie_word_embeddings": False,
        },
        "vision_config": {"hidden_size": 32},
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


# Of experts, of recurrent states, of latents.
INVARIANT_FAMILIES = ("qwen3-moe", "qwen3.5", "kimi-linear")


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
            if slot.is_meta:
                # A table that stays on the host when it is loaded; the worker moves it too.
                model.map_weight(name, draw(*slot.shape, seed=index).to(dtype))
                continue
            spread = 1.0 if "embed" in name else 1.3 * slot.shape[-1] ** -0.5
            if is_big:
                # Where it only has to be timed, the device draws.
                slot.normal_(0.0, 0.05)
                continue
            values = draw(*slot.shape, seed=index) * spread
            if "norm" in name and raw["model_type"] != "gemma3_text":
                values = 1 + 0.2 * values
            slot.copy_(values)
    move_tables(model)
    return model.eval()


class Again:
    """A ``GraphDevice`` of a CPU: what was captured is run again."""

    def capture(
        self, run: Callable[[], torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> tuple["_Rerun", torch.Tensor]:
        """Run the step."""
        del buffers
        result = run()
        return _Rerun(run, result), result

    def allocated_bytes(self) -> int:
        """Nothing is measured."""
        return 0

    def release(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class _Rerun:
    run: Callable[[], torch.Tensor]
    result: torch.Tensor

    def replay(self) -> None:
        """Run the step again, its result where it was."""
        self.result.copy_(self.run())


class Pages:
    """A model with pages of its own; requests take blocks in order and keep them.

    Args:
        raw: config.json.
        model: The model.
        device: Where it is.
        num_blocks: Blocks of each group.
        max_requests: Of a decode step that is replayed; 0: none is.
        num_drafts: Of a request in such a step.
        sizes: Requests of steps that are captured; empty: all up to ``max_requests``.
        has_block: Whether the model's own block makes them.

    Attributes:
        graph_fault: Why no step is replayed, where it should be.
        last_step: The requests of the last step, and its streams.
    """

    last_step: tuple[list[RequestSlice], torch.Tensor]

    def __init__(
        self,
        raw: dict[str, Any],
        model: Any,
        device: torch.device,
        num_blocks: int,
        max_requests: int,
        num_drafts: int = 0,
        sizes: Sequence[int] = (),
        *,
        has_block: bool = False,
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
        self._num_blocks = num_blocks
        self.caches = {name: self._make(name, spec) for name, spec in specs.items()}
        self.forget()
        self.eager = self._make_eager()
        self.steps = self.eager
        self.graph_fault = ""
        if max_requests and can_replay(model, self.layout):
            try:
                self.steps = make_graphed_step_model(
                    model,
                    self.layout,
                    self.caches,
                    device,
                    CudaGraphDevice() if device.type == "cuda" else Again(),
                    sizes=sizes or choose_sizes(max_requests),
                    max_tokens=min(MOST_TOKENS, num_blocks * size),
                    num_drafts=num_drafts,
                    has_block=has_block,
                )
            except RuntimeError as error:  # must not hide what steps do without
                self.graph_fault = f"not captured: {error}"

    def forget(self) -> None:
        """Take all blocks back."""
        self._next = [1] * len(self.layout.groups)
        self._tables: dict[int, list[list[int]]] = {}
        self.lengths: dict[int, int] = {}

    def _make_eager(self) -> StepModel:
        if self.device.type == "cpu" and not IS_INTERPRETED:
            return make_torch_step_model(self.model, self.device)
        return make_gpu_step_model(self.model, self.layout, self.caches, self.device)

    def _make(self, name: str, spec: Any) -> torch.Tensor:
        group, page = self.layout.groups[self.layout.group_of[name]], spec.page_layout()
        blocks = self._count_blocks(group)
        return torch.zeros((blocks, page.rows, page.width), dtype=page.dtype, device=self.device)

    def _count_blocks(self, group: GroupLayout) -> int:
        pieces = 1 if group.state is None else group.state.num_blocks
        return self._num_blocks * pieces * max(1, 32 // group.block_size)

    def step(
        self,
        work: Sequence[tuple[int, list[int]]],
        steps: StepModel | None = None,
        num_drafts: int = 0,
    ) -> torch.Tensor:
        """Runs (request, tokens) in one batch; returns the logits of each one's last row.

        Args:
            work: What to run; of each request's tokens up to ``num_drafts`` are drafts, which
                stand.
            steps: What runs it; None: whatever replays where it can.
            num_drafts: Most drafts of a request.
        """
        steps = steps or self.steps
        slices, tokens, positions, last = [], [], [], []
        for request, new in work:
            start = self.lengths.setdefault(request, 0)
            tables = self._tables.setdefault(request, [[] for _ in self.layout.groups])
            for index, group in enumerate(self.layout.groups):
                pieces = 1 if group.state is None else group.state.num_blocks
                while len(tables[index]) // pieces * group.block_size < start + len(new):
                    # What lies behind the pages a card would read and write all the same.
                    assert self._next[index] < self._count_blocks(group), "no block is left"
                    tables[index].append(self._next[index])
                    self._next[index] += 1
            views = tuple(BlockTableView(0, np.array(ids, dtype=np.int64)) for ids in tables)
            drafts = min(num_drafts, len(new) - 1)
            slices.append(RequestSlice(start, len(new), views, num_drafts=drafts))
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
            if num_drafts and steps.settle_drafts is not None:
                steps.settle_drafts(slices, [item.num_drafts for item in slices])
        self.last_step = slices, streams
        return logits


def generate(
    pages: Pages,
    prompts: Sequence[list[int]],
    num_tokens: int,
    follow: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers greedily: prompts in chunks one by one, then all decode together.

    In the first of these steps some requests have drafts besides, which stand.

    Args:
        pages: A model and its pages.
        prompts: Tokens of each request, of two or more.
        num_tokens: Of each answer.
        follow: int64 [R, num_tokens]: tokens that are answered whatever the logits say.

    Returns:
        The tokens that the logits say, int64 [R, num_tokens], and the logits [R, num_tokens, V].
    """
    logits: list[torch.Tensor] = []
    for request, prompt in enumerate(prompts):
        half = len(prompt) // 2
        pages.step([(request, prompt[:half])])
        logits.append(pages.step([(request, prompt[half:])]).cpu())
    steps = [torch.cat(logits)]
    for number in range(num_tokens - 1):
        chosen = steps[-1].argmax(-1) if follow is None else follow[:, number]
        work = [(request, [token]) for request, token in enumerate(chosen.tolist())]
        if not number:
            work = [(request, tokens + [3] * (request % 3)) for request, tokens in work]
        steps.append(pages.step(work, num_drafts=NUM_DRAFTS).cpu())
    found = torch.stack(steps, 1)
    return found.argmax(-1), found


def check_families(device: torch.device, short: bool) -> dict[str, Any]:
    """Compares greedy tokens in fp32 with the CPU's reference ops; graphs where there is a GPU.

    The device's answers follow the CPU's: a token that differs spoils none behind it. It is wrong
    unless the CPU's logits of the two tokens are as good as equal.

    Returns:
        Family -> what was equal; "wrong" -> family -> what differs, or failed.
    """
    results: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    lengths, num_tokens = ((7, 300, 131), 8 if short else 24)
    if IS_INTERPRETED:
        lengths, num_tokens = (5, 20, 3)[: 2 + (not short)], 2
    for family in FAMILIES:
        begin = time.perf_counter()
        try:
            (expected, right), (found, logits), fault = _answer_twice(
                family, device, lengths, num_tokens
            )
        except Exception as error:  # one family must not hide what the others do
            wrong[family] = f"{type(error).__name__}: {error}"
            continue
        distance = _distance(logits, right)
        results[family] = f"{len(lengths)} answers of {num_tokens} tokens, off by {distance:.1e}"
        told = [
            f"request {r}, token {n}: {found[r, n]} instead of {expected[r, n]}, by {gap:.1e}"
            for r, n in (found != expected).nonzero().tolist()
            if (gap := float(right[r, n, expected[r, n]] - right[r, n, found[r, n]])) > _TIE
        ]
        if fault or told or not distance <= _FAMILY_BOUND:
            wrong[family] = "; ".join([results[family], *told, fault])
        results[f"{family}, seconds"] = round(time.perf_counter() - begin, 2)
        say(device, {**results, "wrong": wrong})
    return {**results, "wrong": wrong}


def _answer_twice(
    family: str, device: torch.device, lengths: Sequence[int], num_tokens: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor], str]:
    """Returns tokens and logits of the CPU by the reference, of a device, and its graphs' fault."""
    raw, cpu = {**TINY, **FAMILIES[family]}, torch.device("cpu")
    prompts = [
        torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in lengths
    ]
    answers: list[tuple[torch.Tensor, torch.Tensor]] = []
    for where, ops in ((cpu, get_reference_op), (device, get_triton_op)):
        model = build_model(raw, torch.float32, where, ops)
        pages = Pages(raw, model, where, 64, 4 if where.type == "cuda" else 0, NUM_DRAFTS)
        if ops is get_reference_op:
            pages.steps = make_torch_step_model(model, cpu, pages.layout, pages.caches)
        follow = answers[0][0] if answers else None
        answers.append(generate(pages, prompts, num_tokens, follow))
    return answers[0], answers[1], pages.graph_fault


def check_invariance(device: torch.device, short: bool) -> dict[str, Any]:
    """Compares bits of a request's logits alone and beside others (VLLM_BATCH_INVARIANT=1)."""
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    results: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for family in INVARIANT_FAMILIES[: 1 if short else 3]:
        try:
            alone, beside = _answer_alone_and_beside(family, device)
        except Exception as error:  # one family must not hide what the others do
            wrong[family] = f"{type(error).__name__}: {error}"
            continue
        results[family] = is_same = torch.equal(alone, beside)
        if not is_same:
            wrong[family] = f"logits differ by up to {float((alone - beside).abs().max())}"
        say(device, {**results, "wrong": wrong})
    return {**results, "wrong": wrong}


def _answer_alone_and_beside(
    family: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    raw = {**TINY, **FAMILIES[family]}
    dtype = torch.float32 if IS_INTERPRETED else torch.bfloat16
    model = build_model(raw, dtype, device, get_triton_op)
    rows = []
    for others in (0, 2 if IS_INTERPRETED else 20):
        pages = Pages(raw, model, device, 64, 0)
        for request in range(others + 1):
            prompt = [1 + request] * (5 + request)
            pages.step([(request, prompt)])
        rows.append(pages.step([(request, [7]) for request in range(others + 1)])[0])
    return rows[0], rows[1]


@dataclass(frozen=True, slots=True)
class Draws:
    """What ``draw_tokens`` reads of ``RandomRows`` and its settings, whose modules need more than a
    bare torch: every second row narrows its choice.
    """

    num_rows: int
    vocab_size: int
    rows: None = None

    @property
    def settings(self) -> "Draws":
        """Itself."""
        return self

    def _alternate(self, first: float, second: float) -> np.ndarray:
        return np.resize(np.array([first, second], dtype=np.float32), self.num_rows)

    @property
    def temperature(self) -> np.ndarray:
        """fp32 [N]."""
        return self._alternate(0.7, 1.3)

    @property
    def min_p(self) -> np.ndarray:
        """fp32 [N]."""
        return self._alternate(0.01, 0.0)

    @property
    def top_k(self) -> np.ndarray:
        """Of each row; all keep everything."""
        return self._alternate(20, self.vocab_size)

    @property
    def top_p(self) -> np.ndarray:
        """fp32 [N]."""
        return self._alternate(0.8, 1.0)


def draw_by_torch(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Returns what each token weighs after the filters, fp32 [N, V], 0 where it is dropped."""
    columns = (draws.temperature, draws.min_p, draws.top_p)
    temperature, min_p, top_p = (torch.from_numpy(c).to(logits.device) for c in columns)
    top_k = torch.from_numpy(draws.top_k.astype(np.int64)).to(logits.device)
    scaled = apply_min_p(logits / temperature[:, None], min_p)
    narrow = apply_top_k(scaled[::2], top_k[::2], 20)
    scaled = torch.stack([narrow, scaled[1::2]], 1).flatten(0, 1)
    return apply_top_p(scaled.softmax(-1), top_p)


def check_packed(device: torch.device, short: bool) -> dict[str, Any]:
    """Compares products of packed matrices with the CPU's."""
    rows = 96 if IS_INTERPRETED or short else 1024
    return gpu_packed.check_packed(device, rows, BOUNDS, partial(say, device))


def check_draws(device: torch.device, short: bool) -> dict[str, Any]:
    """Sees that each drawn token lies at its share of the mass that the filters leave."""
    vocab_size, num_rows = (300, 2) if IS_INTERPRETED else (151936, 8 if short else 64)
    draws = Draws(num_rows, vocab_size)
    logits = 4 * draw(num_rows, vocab_size)
    shares = np.linspace(0.03, 0.97, num_rows, dtype=np.float32)
    tokens = draw_tokens(logits.to(device), draws, shares).cpu()  # type: ignore[arg-type]
    mass = draw_by_torch(logits, draws).double()
    sums = (mass / mass.sum(-1, keepdim=True)).cumsum(-1)
    above = sums.gather(1, tokens[:, None])[:, 0]
    own = mass.gather(1, tokens[:, None])[:, 0]
    below = above - own / mass.sum(-1)
    wanted = torch.from_numpy(shares).double()
    is_right = (own > 0) & (below - 1e-5 <= wanted) & (wanted <= above + 1e-5)
    rows = (~is_right).nonzero()[:, 0].tolist()
    return {"rows": num_rows, "wrong": {str(row): int(tokens[row]) for row in rows}}


def check_waits(device: torch.device, short: bool) -> dict[str, Any]:
    """Runs replayed decode steps with every wait of the host an error (a GPU only)."""
    del short
    if device.type != "cuda":
        return {"waits": "no GPU: not looked at", "wrong": {}}
    raw = {**TINY, **FAMILIES["qwen3-moe"]}
    pages = Pages(raw, build_model(raw, torch.float32, device, get_triton_op), device, 64, 4)
    pages.step([(0, [1, 2, 3])])
    if pages.graph_fault:
        return {"waits": "not looked at", "wrong": {"graphs": pages.graph_fault}}
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
    return {"waits": "none in a step of experts, replayed or not", "wrong": {}}


# -- figures ----------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(run: Callable[[], Any], repeats: int = 20) -> float:
    """Returns the median seconds of a call, by events, after three calls nobody counts."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
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


def bench_limits(device: torch.device, short: bool) -> dict[str, float]:
    """Returns what the card copies and multiplies here."""
    del short
    size = 64 if IS_INTERPRETED else 8192
    source = torch.randn(8 * size * size, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return {
        "copy, GB/s": 2 * source.nbytes / measure(lambda: target.copy_(source)) / 1e9,
        "bf16 product, TFLOP/s": 2 * size**3 / measure(lambda: left @ right) / 1e12,
    }


def find_slowest(run: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Returns what a call's time goes to: kernel -> [microseconds, launches], the slowest first."""
    is_cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    kind = activity.CUDA if is_cuda else activity.CPU
    try:
        with torch.profiler.profile(activities=[kind]) as profile:
            run()
            wait(device)
        name = "self_device_time_total" if is_cuda else "self_cpu_time_total"
        rows = [(getattr(row, name), row.count, row.key) for row in profile.key_averages()]
    except (RuntimeError, AttributeError) as error:  # figures do without what explains them
        return {"not known": f"{type(error).__name__}: {error}"}
    rows = sorted(rows, reverse=True)[:_NUM_SLOWEST]
    return {key[:70]: [round(spent, 1), count] for spent, count, key in rows if spent}


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


GEMMA_4B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
V4_SMALL = {
    **TINY,
    **FAMILIES["deepseek-v4"],
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 512,
    "o_groups": 4,
    "o_lora_rank": 256,
    "compress_ratios": [0, 4, 128, 4, 128, 4, 128, 4, 0],
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "max_position_embeddings": 40960,
}


def bench_attention(device: torch.device, short: bool) -> dict[str, Any]:
    """Returns prefill attention's seconds beside torch's own kernels'."""
    found: dict[str, Any] = {}
    heads, kv_heads, width = 32, 8, 128
    lengths = (40,) if IS_INTERPRETED else (4096,) if short else (1024, 4096, 16384)
    for num_tokens in lengths:
        queries = torch.randn(num_tokens, heads, width, device=device, dtype=torch.bfloat16)
        rows = torch.randn(num_tokens, 2 * kv_heads * width, device=device, dtype=torch.bfloat16)
        cache = torch.zeros(2, 32, 2 * kv_heads * width, device=device, dtype=torch.bfloat16)
        tile = 64 // (heads // kv_heads)
        firsts = torch.arange(0, num_tokens, tile, device=device, dtype=torch.int32)
        zero = torch.zeros(1, device=device, dtype=torch.int32)
        count = torch.full_like(zero, num_tokens)
        requests = PagedRequests(
            torch.zeros_like(firsts), firsts, zero, count, zero, zero, zero, zero, zero, zero
        )
        plan = ScorePlan(width**-0.5, queries_per_tile=tile)
        own = measure(lambda: attend_pages(queries, rows, cache, requests, plan, None))  # noqa: B023
        keys, values = rows.view(num_tokens, 2, kv_heads, width).permute(1, 2, 0, 3)[:, None]
        by_head = queries.transpose(0, 1)[None]
        library = measure(
            lambda: torch.nn.functional.scaled_dot_product_attention(
                by_head,  # noqa: B023
                keys,  # noqa: B023
                values,  # noqa: B023
                is_causal=True,
                enable_gqa=True,
            )
        )
        found[f"{num_tokens} tokens, ms"] = 1000 * own
        found[f"{num_tokens} tokens, of torch's time"] = own / library
        say(device, found)
    return found


def bench_draws(device: torch.device, short: bool) -> dict[str, Any]:
    """Returns the seconds of drawing tokens beside torch's."""
    del short
    found: dict[str, Any] = {}
    for num_rows in (2, 4 if IS_INTERPRETED else 64):
        logits = 4 * torch.randn(num_rows, _VOCAB, device=device)
        draws = Draws(num_rows, _VOCAB)
        shares = np.linspace(0.1, 0.9, num_rows, dtype=np.float32)
        by_kernel = partial(draw_tokens, logits, draws, shares)  # type: ignore[arg-type]
        found[f"kernel, {num_rows} rows, ms"] = 1000 * measure(by_kernel)
        filters = measure(partial(draw_by_torch, logits, draws))
        found[f"torch's filters alone, {num_rows} rows, ms"] = 1000 * filters
        say(device, found)
    return found


def bench_packed(device: torch.device, short: bool) -> dict[str, Any]:
    """Measures products of packed matrices."""
    del short
    size = 128 if IS_INTERPRETED else 8192
    return gpu_packed.bench_packed(device, size, measure, partial(say, device))


def bench_small(device: torch.device, short: bool) -> dict[str, Any]:
    """Returns the figures of a Qwen3-0.6B-shaped model, and transformers' where it is there."""
    raw = choose_shape(QWEN3_SMALL, "qwen3")
    found = bench_model(raw, device, bench_limits(device, short), has_drafts=True)
    say(device, found)
    if short:
        return found
    found |= bench_transformers(raw, device)
    batch = _BATCHES[-1]
    others = found.get(f"transformers, decode, batch {batch}, tokens/s")
    own = found.get(f"decode, batch {batch}, graphs, tokens/s")
    if own and others:
        found[f"decode, batch {batch}, times transformers"] = own / others
    return found


def bench_large(device: torch.device, short: bool) -> dict[str, Any]:
    """Returns the figures of a Qwen3-4B-shaped model."""
    return bench_model(choose_shape(QWEN3_4B, "qwen3"), device, bench_limits(device, short))


def bench_gemma(device: torch.device, short: bool) -> dict[str, Any]:
    """Returns the figures of a Gemma-3-4B-shaped model."""
    return bench_model(choose_shape(GEMMA_4B, "gemma3"), device, bench_limits(device, short))


def bench_v4(device: torch.device, short: bool) -> dict[str, Any]:
    """Returns the figures of a small DeepSeek-V4-shaped model, with drafts too."""
    raw = choose_shape(V4_SMALL, "deepseek-v4")
    found = bench_model(raw, device, bench_limits(device, short))
    say(device, found)
    return bench_drafts(raw, device, found)


def bench_drafts(
    raw: dict[str, Any], device: torch.device, found: dict[str, Any]
) -> dict[str, Any]:
    """Returns what is found, and decode steps with drafts, which its own block makes, all right."""
    model = build_model(
        raw | {"num_nextn_predict_layers": 1}, torch.bfloat16, device, get_triton_op
    )
    for batch in _BATCHES:
        pages = Pages(raw, model, device, 64 * 40, batch, NUM_DRAFTS, (batch,), has_block=True)
        for request in range(batch):
            list(draft(pages, [(request, [1] * _PROMPT)], pages.eager))
        ways = {"no graphs": pages.eager}
        if pages.steps is not pages.eager:
            ways["graphs"] = pages.steps
        elif pages.graph_fault:
            found[f"drafts, batch {batch}, graphs"] = pages.graph_fault
        seconds: dict[str, float] = {}
        for name, steps in ways.items():
            work = [(request, [1] * (1 + NUM_DRAFTS)) for request in range(batch)]
            times = []
            for _ in range(_NUM_STEPS):
                wait(device)
                begin = time.perf_counter()
                for logits in draft(pages, work, steps):
                    logits.argmax(-1).tolist()
                times.append(time.perf_counter() - begin)
            seconds[name] = statistics.median(times[5:])
            found[f"{NUM_DRAFTS} drafts, batch {batch}, {name}, ms a step"] = 1000 * seconds[name]
        if "graphs" in ways:
            gain = seconds["no graphs"] / seconds["graphs"]
            found[f"{NUM_DRAFTS} drafts, batch {batch}, graphs, times no graphs"] = gain
        say(device, found)
        del pages, ways, steps
    return found


def draft(
    pages: Pages, work: Sequence[tuple[int, list[int]]], steps: StepModel
) -> Iterator[torch.Tensor]:
    """Runs a step, and its block on its rows and on one more for each further draft: logits."""
    yield pages.step(work, steps)
    slices, streams = pages.last_step
    layout = block_layout(pages.layout)
    group_id = pages.layout.group_of[MTP_WINDOW]
    own = [replace(item, tables=(item.tables[group_id],)) for item in slices]
    for _ in range(NUM_DRAFTS):
        positions = np.concatenate([item.start + np.arange(item.num_tokens) for item in own])
        next_ids = torch.ones(len(positions), dtype=torch.int64, device=pages.device)
        ends = np.cumsum([item.num_tokens for item in own]) - 1
        with torch.inference_mode():
            meta = steps.build_metadata(own, layout)
            at = torch.from_numpy(positions).to(pages.device)
            streams = steps.model.forward_mtp(streams, next_ids, at, meta, pages.caches)
            streams = streams[torch.from_numpy(ends).to(pages.device)]
            logits = steps.model.compute_mtp_logits(streams)
        yield logits
        own = [replace(item, start=item.start + item.num_tokens, num_tokens=1) for item in own]


def choose_shape(raw: dict[str, Any], family: str) -> dict[str, Any]:
    """Returns the config.json that is timed; where kernels are interpreted, a tiny one."""
    return {**TINY, **FAMILIES[family]} if IS_INTERPRETED else raw


def bench_model(
    raw: dict[str, Any],
    device: torch.device,
    limits: dict[str, float],
    *,
    has_drafts: bool = False,
) -> dict[str, Any]:
    """Returns decode and prefill of a random bf16 model against the limits.

    Args:
        raw: config.json.
        device: Where it runs.
        limits: Of the card.
        has_drafts: Whether steps with drafts are timed too.
    """
    model = build_model(raw, torch.bfloat16, device, get_triton_op)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    # Rows by token id, and logits, which are those of the prompt's last row alone.
    vocabulary = sum(p.nbytes for p in model.parameters() if p.shape[:1] == (raw["vocab_size"],))
    # Of experts a step reads those that were chosen: nothing here says how many.
    has_experts = "moe_intermediate_size" in raw
    found: dict[str, Any] = {**limits, "weights, GB": num_bytes / 1e9}
    for batch in _BATCHES:
        pages = Pages(raw, model, device, 64 * 40, batch)
        for request in range(batch):
            pages.step([(request, [1] * _PROMPT)], pages.eager)
        ways = {"no graphs": pages.eager}
        if pages.steps is not pages.eager:
            ways["graphs"] = pages.steps
        elif pages.graph_fault:
            found[f"batch {batch}, graphs"] = pages.graph_fault
        for name, steps in ways.items():
            work = [(request, [1]) for request in range(batch)]
            seconds = time_steps(pages, work, steps)
            found[f"decode, batch {batch}, {name}, tokens/s"] = batch / seconds
            if batch == 1 and not has_experts:
                share = num_bytes / seconds / 1e9 / limits["copy, GB/s"]
                found[f"decode, batch 1, {name}, share of bandwidth"] = share
            say(device, found)
        if "graphs" in ways:
            eager, replayed = (
                found[f"decode, batch {batch}, {name}, tokens/s"]
                for name in ("no graphs", "graphs")
            )
            found[f"decode, batch {batch}, graphs, times no graphs"] = replayed / eager
        slowest = find_slowest(partial(pages.step, work, pages.eager), device)
        found[f"decode, batch {batch}, kernels, us"] = slowest
        say(device, found)
        del pages, ways, steps
        if has_drafts:
            found |= time_drafts(raw, model, device, batch)
            say(device, found)
    pages = Pages(raw, model, device, _PREFILL // 32 + 2, 0)

    def prefill() -> None:
        pages.forget()
        pages.step([(0, [1] * _PREFILL)], pages.eager)

    seconds = measure(prefill, 3)
    found["prefill, tokens/s"] = _PREFILL / seconds
    if not has_experts:
        # Two bytes a weight, two operations a weight and token.
        rate = (num_bytes - vocabulary) * _PREFILL / seconds / 1e12
        found["prefill, share of bf16 rate"] = rate / limits["bf16 product, TFLOP/s"]
    say(device, found)
    return found | {"prefill, kernels, us": find_slowest(prefill, device)}


def time_steps(
    pages: Pages, work: Sequence[tuple[int, list[int]]], steps: StepModel, num_drafts: int = 0
) -> float:
    """Returns the median seconds of a step again and again, its tokens on the host in the end."""
    times = []
    for _ in range(_NUM_STEPS):
        wait(pages.device)
        begin = time.perf_counter()
        pages.step(work, steps, num_drafts).argmax(-1).tolist()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[5:])


def time_drafts(
    raw: dict[str, Any], model: Any, device: torch.device, batch: int
) -> dict[str, Any]:
    """Returns the milliseconds of steps whose requests all have drafts, replayed and not."""
    pages = Pages(raw, model, device, 64 * 40, batch, NUM_DRAFTS, (batch,))
    for request in range(batch):
        pages.step([(request, [1] * _PROMPT)], pages.eager)
    work = [(request, [1] * (1 + NUM_DRAFTS)) for request in range(batch)]
    name = f"decode, batch {batch}, {NUM_DRAFTS} drafts"
    eager = time_steps(pages, work, pages.eager, NUM_DRAFTS)
    found: dict[str, Any] = {f"{name}, no graphs, ms": 1000 * eager}
    if pages.steps is not pages.eager:
        replayed = time_steps(pages, work, pages.steps, NUM_DRAFTS)
        found[f"{name}, graphs, ms"] = 1000 * replayed
        found[f"{name}, graphs, times no graphs"] = eager / replayed
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
    few, many = (2, 3) if IS_INTERPRETED else (8, 40)
    for batch in _BATCHES:
        prompt = torch.ones(batch, _PROMPT, dtype=torch.int64, device=device)
        seconds = []
        for num_tokens in (few, many, few, many):
            wait(device)
            begin = time.perf_counter()
            with torch.inference_mode():
                model.generate(
                    prompt, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
                )
            wait(device)
            seconds.append(time.perf_counter() - begin)
        found[f"transformers, decode, batch {batch}, tokens/s"] = (
            (many - few) * batch / (seconds[3] - seconds[2])
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


# Name -> what it does. Those that compare report what is wrong.
SECTIONS: dict[str, Callable[[torch.device, bool], dict[str, Any]]] = {
    "kernels": check_kernels,
    "packed": check_packed,
    "families": check_families,
    "waits": check_waits,
    "draws": check_draws,
    "invariance": check_invariance,
    "limits": bench_limits,
    "small": bench_small,
    "large": bench_large,
    "attention": bench_attention,
    "sampling": bench_draws,
    "packed_speed": bench_packed,
    "gemma": bench_gemma,
    "v4": bench_v4,
}


def main() -> int:
    """Run one section; exits with 1 where something is wrong, with 2 where it needs a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--short", action="store_true", help="fewer cases and repeats")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {"machine": describe(device)}
    if device.type == "cpu" and not IS_INTERPRETED:
        print("There is no GPU here; VLLM_CUDA_REFERENCE=1 tries all in Triton's interpreter.")
        return 2
    report["results"] = SECTIONS[args.section](device, args.short)
    print(json.dumps(report))
    return 1 if report["results"].get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
