"""Gemma 4 E2B's shape with bf16 weights: what rows that nobody reads cost, and decoding.

    python -m benchmarks.gemma4 [--tokens 256] [--vocab 8192] [--repeats 3] [--threads 1]
        [--with transformers]

All 35 layers at their real widths; the vocabulary is cut, which prefill does not notice. One chunk
of a prompt whose last row is read, natively: as served, and with every row taken through all layers
(the two in turns); then decode steps at batch 1, beside those of a Gemma 3 shaped as in
``benchmarks.families``: bytes of weights a second, and the share of what a sum over 512 MiB reads.
Seconds are of processor time on one thread, of the wall on several. One JSON line.
"""

import argparse
import re
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.families import CONFIGS, measure_bandwidth
from benchmarks.result import percentiles, print_result
from tests.model_executor.models.decoder.building import make_harness
from tests.model_executor.models.harness import PagedHarness
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.attention.ops.registry import get_reference_op

_KINDS = ["full_attention" if (layer + 1) % 5 == 0 else "sliding_attention" for layer in range(35)]
DECODE_STEPS = 8
SEED = 0


def shape_of_e2b(vocab_size: int) -> dict[str, Any]:
    """Return E2B's config.json with another vocabulary."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": vocab_size,
        "vocab_size_per_layer_input": vocab_size,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "layer_types": _KINDS,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 131072,
    }


def build(raw: dict[str, Any]) -> DecoderForCausalLM:
    """Return our model; its numbers do not matter to speed, that they were written does."""
    config = resolve_model(raw["architectures"]).parse_config(raw)
    model = DecoderForCausalLM(config, ops=get_reference_op, dtype=torch.bfloat16, device="cpu")
    for name, slot in model.weight_slots().items():
        if slot.is_meta:
            model.map_weight(name, torch.full(slot.shape, 0.01, dtype=slot.dtype))
        else:
            slot.fill_(1.0 if "norm" in name or "scalar" in name else 0.01)
    return model


def build_reference(raw: dict[str, Any]) -> Any:
    """Return transformers' model; each fifth layer has the same tensors where shapes allow it.

    They are many times what the processor's caches hold, so that steps read memory as with tensors
    for each layer, at a fifth of the size.
    """
    fields = {name: value for name, value in raw.items() if name != "model_type"}
    config = AutoConfig.for_model(raw["model_type"], **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.train(False).to(torch.bfloat16)
    made: dict[tuple[Any, ...], torch.Tensor] = {}

    def make(name: str, like: torch.Tensor) -> torch.Tensor:
        layer = re.fullmatch(r"(.*layers\.)(\d+)(\..*)", name)
        key = (layer[1], int(layer[2]) % 5, layer[3]) if layer else (name,)
        value = 1.0 if "norm" in name or "scalar" in name else 0.01
        if (*key, like.shape) not in made:
            made[*key, like.shape] = torch.full(like.shape, value, dtype=like.dtype)
        return made[*key, like.shape]

    state = {name: make(name, tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    fresh = AutoModelForCausalLM.from_config(_smallest(raw))
    real = dict(fresh.named_buffers())
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            owner = model.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], real[name])
    return model


def _smallest(raw: dict[str, Any]) -> Any:
    """Return a config whose model has the same buffers beside weights, and hardly any weights."""
    names = ("hidden_size", "intermediate_size", "hidden_size_per_layer_input")
    small = dict.fromkeys((*names, "vocab_size", "vocab_size_per_layer_input"), 8)
    fields = {name: value for name, value in {**raw, **small}.items() if name != "model_type"}
    return AutoConfig.for_model(raw["model_type"], **fields)


def make_steps(model: DecoderForCausalLM, threads: int, num_tokens: int) -> PagedHarness:
    """Return pages for one request in bf16."""
    blocks = (num_tokens + DECODE_STEPS + 64) // 16 + 8
    return make_harness(model, num_blocks=2 * blocks, native=threads, cache_dtype=torch.bfloat16)


def prefill(harness: PagedHarness, token_ids: list[int], clock: Callable[[], float]) -> float:
    """Return the seconds of one chunk whose last row is read."""
    request = harness.add(token_ids)
    request.wanted_from = len(token_ids) - 1
    begin = clock()
    harness.step([(request, len(token_ids))])
    seconds = clock() - begin
    harness.release(request)
    return seconds


def decode(harness: PagedHarness, token_ids: list[int], clock: Callable[[], float]) -> float:
    """Return the seconds of a decode step at batch 1."""
    request = harness.add(token_ids)
    harness.step([(request, len(token_ids) - DECODE_STEPS - 1)])
    harness.step([(request, 1)])
    begin = clock()
    for _ in range(DECODE_STEPS):
        harness.step([(request, 1)])
    seconds = (clock() - begin) / DECODE_STEPS
    harness.release(request)
    return seconds


@torch.inference_mode()
def time_reference(
    model: Any, token_ids: list[int], clock: Callable[[], float]
) -> tuple[float, float]:
    """Return transformers' seconds of the prompt, and of a decode step behind it."""
    begin = clock()
    output = model(torch.tensor([token_ids]), use_cache=True, logits_to_keep=1)
    first = clock() - begin
    begin = clock()
    for _ in range(DECODE_STEPS):
        output = model(output.logits[:, -1:].argmax(-1), past_key_values=output.past_key_values)
    return first, (clock() - begin) / DECODE_STEPS


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    clock = time.process_time if args.threads == 1 else time.perf_counter
    raw = shape_of_e2b(args.vocab)
    model = build(raw)
    reference = build_reference(raw) if args.reference else None
    small = {**CONFIGS["gemma3"], "architectures": ["Gemma3ForCausalLM"]}
    other_model = build(small)
    token_ids = torch.randint(2, args.vocab, (args.tokens,)).tolist()
    served, whole = (make_steps(model, args.threads, args.tokens) for _ in range(2))
    whole.steps.model._struct.last_owner = len(model.layers) - 1  # type: ignore[attr-defined]
    other = make_steps(other_model, args.threads, args.tokens)
    samples: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        samples.setdefault(name, []).append(1000 * seconds)

    for turn in range(args.repeats + 1):
        if turn == 1:
            samples.clear()  # the first was a warm-up
        note("prefill_ms", prefill(served, token_ids, clock))
        note("prefill_all_rows_ms", prefill(whole, token_ids, clock))
        note("decode_ms", decode(served, token_ids, clock))
        note("decode_gemma3_ms", decode(other, token_ids, clock))
        if args.reference:
            first, step = time_reference(reference, token_ids, clock)
            note("prefill_transformers_ms", first)
            note("decode_transformers_ms", step)
    values: dict[str, Any] = {name: percentiles(found) for name, found in samples.items()}
    middle = {name: found["p50"] for name, found in values.items()}
    values["prefill_ratio"] = round(middle["prefill_all_rows_ms"] / middle["prefill_ms"], 2)
    most = measure_bandwidth(clock)
    for name, of in (("decode_ms", model), ("decode_gemma3_ms", other_model)):
        rate = sum(p.nbytes for p in of.parameters()) / middle[name] / 1e6
        values[name] |= {"gb_per_s": round(rate, 2), "share": round(rate / most, 3)}
    if args.reference:
        for part in ("prefill", "decode"):
            ratio = middle[f"{part}_transformers_ms"] / middle[f"{part}_ms"]
            values[f"{part}_over_transformers"] = round(ratio, 2)
    values["machine_gb_per_s"] = round(most, 2)
    return values


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--with", dest="reference", choices=("transformers",), help="Measured in the same run."
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print_result("gemma4", vars(args), measure(args))


if __name__ == "__main__":
    main()
