"""What does structured output cost a decode step of a whole batch?

    python -m benchmarks.structured [--batch 32] [--steps 60] [--threads 1]

The embedded checkpoint, engine cores with equal requests: one decodes freely, one fills an array of
objects that a JSON schema describes, one does so or calls a tool with such an array. Their steps
take turns, so that noise falls on all. One JSON line: milliseconds per step, of CPU time of all
threads together and of wall time (masks are filled beside the model, where a core is free), the
shares that the schema adds, and that of penalties and a bias on all rows.
"""

import argparse
import time
from typing import Any

import torch

from benchmarks.result import percentiles, print_result
from vllm.config.speculative import NO_DRAFTS
from vllm.parser.forced_calls import AnswerGrammar, answer_tag
from vllm.parser.grammar_formats import json_of
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers.chat_tools import parse_tools
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_factory import build_engine_core
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.messages import EngineCoreRequest

# Shares are of the median of CPU time, and of the least disturbed tenth of wall time.
_KINDS = ("", "_wall")
PROMPT_TOKENS = 64
NUM_WARM_UP = 5
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "size": {"type": "integer", "minimum": 0, "maximum": 9999},
            "kind": {"enum": ["lamp", "chair", "table"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["name", "size", "kind", "tags"],
        "additionalProperties": False,
    },
}
# An answer in this form, or calls with equal arguments: what tools with a response format are.
_TOOL = {
    "type": "function",
    "function": {
        "name": "store",
        "parameters": {"type": "object", "properties": {"of": SCHEMA}, "required": ["of"]},
    },
}
CALL_OR_JSON = answer_tag("deepseek_v4", AnswerGrammar(parse_tools([_TOOL]), json_of(SCHEMA)))
ASKS: dict[str, dict[str, Any]] = {
    "free": {},
    "schema": {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "call_or_json": {"structured_outputs": StructuredOutputsParams(structural_tag=CALL_OR_JSON)},
    "penalties": {
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": dict.fromkeys(range(100, 400), 1.0),
    },
}


def make_core(ask: dict[str, Any], args: argparse.Namespace) -> EngineCore:
    """Return a core all of whose requests are past their prompts."""
    engine = EngineArgs(
        model="deepseek-v4",
        block_size=32,
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 27,
        max_num_seqs=args.batch,
        speculative_config=dict(NO_DRAFTS),
    )
    core = build_engine_core(engine.create_vllm_config())
    for i in range(args.batch):
        params = SamplingParams(
            temperature=1.0, seed=i, max_tokens=900, min_tokens=900, ignore_eos=True, **ask
        )
        prompt = [10 + (7 * i + j) % 1900 for j in range(PROMPT_TOKENS)]
        message = EngineCoreRequest(f"q{i}", prompt, params, time.monotonic())
        core.add_request(core.make_request(message))
    while min((r.num_output_tokens for r in core.scheduler.running), default=0) < NUM_WARM_UP or (
        len(core.scheduler.running) < args.batch
    ):
        core.step()
    return core


def time_step(core: EngineCore) -> tuple[float, float]:
    """Run one step; return its milliseconds of CPU time and of wall time."""
    begin, begin_wall = time.process_time(), time.perf_counter()
    core.step()
    return 1e3 * (time.process_time() - begin), 1e3 * (time.perf_counter() - begin_wall)


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    cores = {name: make_core(ask, args) for name, ask in ASKS.items()}
    torch.set_num_threads(args.threads)
    samples: dict[str, list[float]] = {f"{name}{kind}": [] for kind in _KINDS for name in cores}
    for _ in range(args.steps):
        for name, core in cores.items():
            for kind, milliseconds in zip(_KINDS, time_step(core), strict=True):
                samples[f"{name}{kind}"].append(milliseconds)
    for core in cores.values():
        core.shutdown()
    values: dict[str, Any] = {f"{k}_ms": percentiles(v) for k, v in samples.items()}
    for kind, level in zip(_KINDS, ("p50", "p10"), strict=True):
        base = values[f"free{kind}_ms"][level]
        for name in ("schema", "call_or_json", "penalties"):
            share = values[f"{name}{kind}_ms"][level] / base - 1
            values[f"{name}{kind}_share"] = round(share, 3)
    print_result("structured", vars(args), values)


if __name__ == "__main__":
    main()
