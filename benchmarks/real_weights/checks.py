"""What is checked on a trained model: each check returns figures, and whether all is well."""

import json
import multiprocessing
import os
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from jsonschema import Draft202012Validator

from benchmarks.real_weights.oracle import load_oracle
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

_POOL_BYTES = 256 << 20
# Of the engine whose chats are all asked again.
_WARM_POOL_BYTES = 4 << 30
_LENGTH = 4096
# Chats whose rows a process that is killed may not have written yet.
_ON_THEIR_WAY = 4
# Subjects of questions; what is asked is of no weight, that it is language is.
_SUBJECTS = (
    *("a river in spring", "the moon", "how bread rises", "a lighthouse", "old maps"),
    *("a train at night", "the number seven", "why leaves fall", "a broken clock", "winter"),
)
_UNFINISHED = re.compile(r"unfinished (\w+)")
_ASKS = ("Describe", "Explain in one sentence", "Write a line about", "Ask a question about")


@dataclass(slots=True)
class Report:
    """What a check found.

    Attributes:
        figures: By name.
        faults: What went wrong, in words; none: all is well.
    """

    figures: dict[str, Any]
    faults: list[str] = field(default_factory=list)


def open_engine(path: Path, **options: Any) -> LLM:
    """Return an engine over a file, with a pool that is the same everywhere."""
    settings: dict[str, Any] = {
        "block_size": 32,
        "max_model_len": _LENGTH,
        "kv_cache_memory_bytes": _POOL_BYTES,
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


def check_exactness(path: Path, num_chats: int, seed: int) -> Report:
    """Ask the same chats in every way: each bit is the same.

    Cold, first, warm, in chunks, in company, drafted, restored from a folder, and restored from a
    folder whose writer was killed while it wrote.
    """
    with open_engine(path, enable_prefix_caching=False) as llm:
        prompts = [_draw_prompt(llm, random.Random(f"{seed} {i}")) for i in range(num_chats)]
        expected = [_ask(llm, [ids]) for ids in prompts]
    report = Report({"chats": num_chats})

    def compare(name: str, answers: Sequence[Any]) -> None:
        differing = sum(a != b for a, b in zip(answers, expected, strict=True))
        report.figures[name] = num_chats - differing
        if differing:
            report.faults.append(f"{name}: {differing} of {num_chats} answers differ")

    with open_engine(path, kv_cache_memory_bytes=_WARM_POOL_BYTES) as llm:
        compare("first", [_ask(llm, [ids]) for ids in prompts])
        compare("warm", [_ask(llm, [ids]) for ids in prompts])
        report.figures["warm_hits"] = _count_hits(llm, prompts)
    if report.figures["warm_hits"] < num_chats:
        report.faults.append(f"warm: only {report.figures['warm_hits']} chats hit to the unit")
    with open_engine(path, max_num_batched_tokens=64) as llm:
        compare("chunks", [_ask(llm, [ids]) for ids in prompts])
    with open_engine(path) as llm:
        compare("company", [[one] for one in _ask(llm, prompts)])
    with open_engine(path, speculative_config={"method": "ngram"}) as llm:
        compare("drafted", [_ask(llm, [ids]) for ids in prompts])
    with tempfile.TemporaryDirectory() as folder:
        for name in ("written", "restored"):
            with open_engine(path, kv_transfer_config=_keep_in(folder)) as llm:
                compare(name, [_ask(llm, [ids]) for ids in prompts])
    with tempfile.TemporaryDirectory() as folder:
        _write_and_be_killed(path, folder, prompts)
        with open_engine(path, kv_transfer_config=_keep_in(folder)) as llm:
            report.figures["killed_hits"] = _count_hits(llm, prompts)
            compare("killed", [_ask(llm, [ids]) for ids in prompts])
    # Half of the chats were answered before the kill; rows of the last few may be on their way.
    if report.figures["killed_hits"] * 4 < num_chats - _ON_THEIR_WAY:
        report.faults.append(f"killed: only {report.figures['killed_hits']} chats are found")
    return report


def _keep_in(folder: str) -> dict[str, Any]:
    tier = {"type": "fs", "root_dir": f"{folder}/cache", "max_size": "2GiB"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"secondary_tiers": [tier], "always_restore": True},
    }


def _write_and_be_killed(path: Path, folder: str, prompts: Sequence[list[int]]) -> None:
    """Have a process answer chats with a folder for their rows, and kill it in the midst."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(path, folder, prompts, there))
    process.start()
    there.close()
    try:
        for _ in range(-(-len(prompts) // 2)):
            here.recv()
    finally:
        process.kill()
        process.join()


def _answer(path: Path, folder: str, prompts: Sequence[list[int]], told: Connection) -> None:
    # The engine in this process, so that it dies with it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with open_engine(path, kv_transfer_config=_keep_in(folder)) as llm:
        for ids in prompts:
            _ask(llm, [ids])
            told.send(len(ids))


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
    said = [
        f"{rng.choice(_ASKS)} {rng.choice(_SUBJECTS)}, number {rng.randrange(1000)}."
        for _ in range(rng.randrange(1, 30))
    ]
    if tokenizer.chat_template is None:
        return tokenizer.encode(" ".join(said))
    chat = [{"role": "user", "content": " ".join(said)}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert isinstance(ids, list)
    return ids


def _ask(llm: LLM, prompts: Sequence[list[int]]) -> list[Any]:
    """Return greedy answers with the bits of their log probabilities."""
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    answers = []
    for output in outputs:
        answer = output.outputs[0]
        assert answer.logprobs is not None
        bits = [
            entry[t].logprob for entry, t in zip(answer.logprobs, answer.token_ids, strict=True)
        ]
        answers.append((list(answer.token_ids), bits))
    return answers


def _count_hits(llm: LLM, prompts: Sequence[list[int]]) -> int:
    """Return how many of the prompts hit to the unit."""
    params = SamplingParams(max_tokens=1, temperature=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return sum(
        output.num_cached_tokens == (len(ids) - 1) // 32 * 32
        for ids, output in zip(prompts, outputs, strict=True)
    )
