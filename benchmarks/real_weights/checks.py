"""What is checked on a trained model: each check returns figures, and whether all is well."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jsonschema import Draft202012Validator

from benchmarks.real_weights.chats import draw_text, encode_chat
from benchmarks.real_weights.oracle import load_oracle
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

_POOL_BYTES = 256 << 20
# Tokens of a unit of the cache.
BLOCK_SIZE = 32
_LENGTH = 4096
_UNFINISHED = re.compile(r"unfinished (\w+)")


@dataclass(slots=True)
class Report:
    """What a check found.

    Attributes:
        figures: By name.
        faults: What went wrong, in words; none: all is well.
        seconds: How long it took, whole ones.
    """

    figures: dict[str, Any]
    faults: list[str] = field(default_factory=list)
    seconds: int = 0


def open_engine(path: Path, **options: Any) -> LLM:
    """Return an engine over a file, with a pool that is the same everywhere and no drafts."""
    settings: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "max_model_len": _LENGTH,
        "kv_cache_memory_bytes": _POOL_BYTES,
        "speculative_config": {"method": "none"},
    }
    return LLM(str(path), **settings | options)


def check_log_probabilities(path: Path, num_texts: int, seed: int) -> Report:
    """Compare each prompt's log probabilities with transformers over the decoded values.

    Both in fp32, the cache too.
    """
    oracle = load_oracle(path)
    with open_engine(path, kv_cache_dtype="float32") as llm:
        prompts = [_draw_prompt(llm, random.Random(f"{seed} {i}")) for i in range(num_texts)]
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    worst, num_tokens, greedy = 0.0, 0, 0
    for ids, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([ids])).logits[0]
        expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert output.prompt_logprobs is not None
        told = [
            entry[token].logprob
            for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
        ]
        worst = max(worst, float((expected - torch.tensor(told)).abs().max()))
        num_tokens += len(told)
        greedy += int(logits[-1].argmax()) == output.outputs[0].token_ids[0]
    figures = {"tokens": num_tokens, "max_difference": worst, "greedy_equal": greedy}
    report = Report({**figures, "texts": num_texts})
    if worst > 1e-3:
        report.faults.append(f"a log probability differs by {worst:.2g}")
    if greedy < num_texts:
        report.faults.append(f"{num_texts - greedy} greedy tokens differ")
    return report


def check_schemas(path: Path, schemas: Sequence[Mapping[str, Any]]) -> Report:
    """Have the model answer by schemas: what it ends by itself validates, the rest says why not."""
    told = "Answer with JSON that follows this schema: "
    params = [
        SamplingParams(
            max_tokens=400,
            temperature=0,
            structured_outputs=StructuredOutputsParams(json=json.dumps(schema)),
        )
        for schema in schemas
    ]
    with open_engine(path) as llm:
        asked = [f"{told}{json.dumps(schema)}\n" for schema in schemas]
        outputs = llm.generate(list(asked), params)
    report = Report({"schemas": len(schemas), "stopped": 0, "valid": 0})
    for schema, output in zip(schemas, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason != "stop":
            named = _UNFINISHED.match(str(answer.stop_reason))
            if named is None:
                report.faults.append(f"{json.dumps(schema)}: nothing says why it has no end")
            where = f"unfinished_{named[1] if named else 'unnamed'}"
            report.figures[where] = report.figures.get(where, 0) + 1
            continue
        report.figures["stopped"] += 1
        faults = list(Draft202012Validator(schema).iter_errors(json.loads(answer.text)))
        report.figures["valid"] += not faults
        if faults:
            report.faults.append(f"{json.dumps(schema)}: {answer.text[:200]}: {faults[0].message}")
    return report


def _draw_prompt(llm: LLM, rng: random.Random) -> list[int]:
    """Return a chat's tokens where the model has chats, else a text's; 20 to 600 of them."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    return encode_chat(tokenizer, [draw_text(rng, rng.randrange(1, 30))])
