"""Whether a request's answer depends on what else the server does.

    python -m benchmarks.same_bits [--requests 1000] [--tokens 8] [--settings crowd,chunks]
        [--shape gemma4|qwen3|qwen3.5|deepseek-v4.1|...] [--stored Q4_0|IQ2_XXS,Q2_K|w4a16|...]
        [--quantization int8] [--kv-cache-dtype int8] [--pool-mib 4] [--offline]

Random prompts, half of them behind one of a few long prefixes, go one by one to a server that runs
one request at a time on one thread and caches nothing; every second answer is drawn, with a seed.
The same prompts then go all at once, in another order, to servers with other settings. An answer
counts as equal if its token ids and every log probability, top five included, are (``==``). One
JSON line, which also counts what each setting is there for: hits, drafts, preemptions. Exits with
1 if any answer differs, or if a setting did not do what it is there for.

``--shape`` serves random weights of a small shape: ``gemma4`` has windows, layers that share keys
and values, and per-layer inputs, as E2B; ``gemma4-experts`` has one product for keys and values and
experts beside the MLP, as 26B-A4B; the others have recurrent layers. Those that end in ``-mtp``
have a block that drafts and is right about every second time, for the settings of that name.
``--stored`` keeps the matrices of ``--shape qwen3`` in types of GGUF, in turn, or in one of the
formats of ``packed_formats``. ``--offline`` asks engines in this process in place of servers.
``--pool-mib``: what settings that preempt begin with; where nobody is, they try half of it.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.live_server import LiveServer
from benchmarks.result import print_result
from tests.model_executor.model_loader.gguf_files import Type, write_gguf
from tests.model_executor.model_loader.packed_formats import FORMATS, write_quantised
from tests.model_executor.models.decoder.checkpoints import VOCAB_SIZE, write_model
from tests.model_executor.models.decoder.drafting import write_drafting_model
from tests.model_executor.models.decoder.reference import (
    build_hf_model,
    deepseek_v32,
    gemma4_moe,
    gemma4_small,
    glm5_next,
    glm_moe_dsa,
    kimi_linear,
    published_tensors,
    qwen3,
    qwen3_5,
)
from tests.model_executor.models.decoder.test_gated_delta import OTHERS
from tests.model_executor.models.deepseek_v41.tiny import BYTE_VOCAB, write_checkpoint
from tests.tokenizers.family_tokenizers import byte_level
from tools.checkpoints.published_spelling import Spelling
from vllm import LLM, SamplingParams, envs

MODEL_NAME = "measured"
COMMON = ("--block-size", "32", "--max-model-len", "1024", "--served-model-name", MODEL_NAME)
NO_CACHE = "--no-enable-prefix-caching"
SEED = 16
PREEMPTIONS = "vllm:num_preemptions_total"


@dataclass(frozen=True, slots=True)
class Setting:
    """How a server is run.

    Attributes:
        flags: Of ``vllm serve``.
        in_flight: Requests that are sent at once.
        threads: That compute.
        times: An answer is so many times as long as what is compared of it.
        pool_mib: Of the cache.
        counts: The counter of ``/metrics`` that must not stay at 0.
    """

    flags: tuple[str, ...]
    in_flight: int = 1
    threads: int = 1
    times: int = 1
    pool_mib: int = 256
    counts: str = ""


ALONE = Setting(("--max-num-seqs", "1", NO_CACHE))
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
SETTINGS = {
    "crowd": Setting(("--max-num-seqs", "64", NO_CACHE), 64),
    "threads": Setting(("--max-num-seqs", "64", NO_CACHE), 64, threads=2),
    "chunks": Setting(("--max-num-seqs", "16", "--max-num-batched-tokens", "64"), 32),
    "hits": Setting(("--max-num-seqs", "64"), 48, threads=2, counts="vllm:prefix_cache_hits_total"),
    "drafts": Setting(
        ("--max-num-seqs", "32", "--speculative-config", DRAFTS),
        32,
        counts="vllm:spec_decode_num_draft_tokens_total",
    ),
    "preemption": Setting(("--max-num-seqs", "64"), 64, times=10, counts=PREEMPTIONS),
}
MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}')
MTP_SETTINGS = {
    "mtp": Setting(
        ("--max-num-seqs", "32", "--max-num-batched-tokens", "64", *MTP),
        32,
        threads=2,
        times=2,
        counts="vllm:spec_decode_num_accepted_tokens_total",
    ),
    "mtp-preemption": Setting(
        ("--max-num-seqs", "64", *MTP),
        64,
        times=10,
        counts=PREEMPTIONS,
    ),
}
_GEMMA4 = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "global_head_dim": 128,
    "sliding_window": 48,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gemma4": gemma4_small(**_GEMMA4, hidden_size_per_layer_input=32),
    "gemma4-experts": gemma4_moe(**_GEMMA4, moe_intermediate_size=64),
    # Wide enough for all types of GGUF, and for several chains of a sum.
    "qwen3": qwen3(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=768, num_hidden_layers=4
    ),
    "qwen3.5": qwen3_5(vocab_size=VOCAB_SIZE),
    **{
        name: {**raw, "vocab_size": VOCAB_SIZE}
        for name, raw in (
            ("qwen3.5-experts", OTHERS["qwen 3.5 with experts"]),
            ("qwen3-next", OTHERS["qwen3-next"]),
        )
    },
    "kimi": kimi_linear(vocab_size=VOCAB_SIZE),
    # Of most prompts a part of the keys is chosen.
    "glm": glm5_next(vocab_size=VOCAB_SIZE, index_topk=32),
    "deepseek-v3.2": deepseek_v32(vocab_size=VOCAB_SIZE),
    "glm-5": glm_moe_dsa(vocab_size=VOCAB_SIZE),
}
# Ten layers of every kind, FP8 matrices and FP4 experts.
V41 = "deepseek-v4.1"
# Shape -> the drafting model of the tests.
DRAFTING = {
    "qwen3.5-mtp": "qwen 3.5",
    "qwen3.5-experts-mtp": "qwen 3.5 with experts",
    "qwen3-next-mtp": "qwen3-next",
    "glm-mtp": "glm",
    "deepseek-v3.2-mtp": "deepseek v3.2",
    "glm-5-mtp": "glm 5",
}


def make_prompts(count: int, num_ids: int) -> list[list[int]]:
    """Return prompts of 2 to 300 tokens, of ids below ``num_ids``."""
    rng = random.Random(SEED)

    def draw(length: int) -> list[int]:
        # Few different tokens: drafts from the prompt itself come true sometimes.
        return [rng.randrange(5, rng.choice((30, num_ids))) for _ in range(length)]

    prefixes = [draw(rng.randrange(60, 250)) for _ in range(8)]
    return [
        (rng.choice(prefixes) if rng.random() < 0.5 else []) + draw(rng.randrange(2, 50))
        for _ in range(count)
    ]


async def ask_all(
    url: str, prompts: Sequence[list[int]], num_tokens: int, setting: Setting
) -> list[Any]:
    """Return the answers in the order of the prompts; they are sent in another."""
    gate = asyncio.Semaphore(setting.in_flight)
    answers: list[Any] = [None] * len(prompts)

    async def ask(client: httpx.AsyncClient, index: int) -> None:
        body = {
            "model": MODEL_NAME,
            "prompt": prompts[index],
            "max_tokens": num_tokens * setting.times,
            "temperature": 0.8 * (index % 2),
            "top_p": 0.95,
            "seed": index,
            "ignore_eos": True,
            "logprobs": 5,
            "return_token_ids": True,
        }
        async with gate:
            response = await client.post(f"{url}/v1/completions", json=body)
        response.raise_for_status()
        choice = response.json()["choices"][0]
        found = choice["logprobs"]
        answers[index] = [
            values[:num_tokens]
            for values in (choice["token_ids"], found["token_logprobs"], found["top_logprobs"])
        ]

    order = list(range(len(prompts)))
    if setting.in_flight > 1:
        random.Random(SEED + setting.in_flight).shuffle(order)
    # A connection that idles while the machine is busy may be closed as it is used again.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        await asyncio.gather(*(ask(client, index) for index in order))
    return answers


def write_shape(shape: str, folder: Path, stored: str | None = None) -> Path:
    """Write the checkpoint of a shape; return what is served."""
    if shape in DRAFTING:
        write_drafting_model(DRAFTING[shape], folder)
        return folder
    if shape == V41:
        folder.mkdir()
        write_checkpoint(folder, 4, Spelling(block_shape=(32, 32)))
        return folder
    raw, tokenizer = SHAPES[shape], byte_level()
    if stored is not None and stored not in FORMATS:
        folder.mkdir()
        state = published_tensors(build_hf_model(raw, seed=7))
        file = folder / "model.gguf"
        types = [Type[name] for name in stored.split(",")]
        write_gguf(shape, raw, state, file, types, tokenizer)
        return file
    model = write_model(raw, folder, tokenizer)
    if stored is not None:
        write_quantised(FORMATS[stored], raw, published_tensors(model), folder)
    return folder


def _check_stored(stored: str) -> str:
    """Returns what ``--stored`` names, if there is all of it."""
    unknown = [name for name in stored.split(",") if name not in Type.__members__]
    if stored not in FORMATS and unknown:
        known = ", ".join([*FORMATS, *Type.__members__])
        raise argparse.ArgumentTypeError(f"{unknown[0]} is not known: use {known}")
    return stored


def read_counter(url: str, name: str) -> int:
    """Return a counter of ``/metrics``, over all its labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in found))


def answer_with(
    folder: Path,
    model: str,
    dtype: str,
    prompts: Sequence[list[int]],
    num_tokens: int,
    setting: Setting,
) -> tuple[list[Any], int]:
    """Return the answers of a server of its own, and what it counted."""
    os.environ["OMP_NUM_THREADS"] = str(setting.threads)
    flags = (*COMMON, *setting.flags, "--dtype", dtype)
    flags = (*flags, "--kv-cache-memory-bytes", f"{setting.pool_mib}M")
    with LiveServer(folder / "server.log", model, *flags) as server:
        answers = asyncio.run(ask_all(server.url, prompts, num_tokens, setting))
        return answers, read_counter(server.url, setting.counts) if setting.counts else 0


def answer_offline(
    _folder: Path,
    model: str,
    dtype: str,
    prompts: Sequence[list[int]],
    num_tokens: int,
    setting: Setting,
) -> tuple[list[Any], int]:
    """Return the answers of an engine in this process, and what it counted."""
    torch.set_num_threads(setting.threads)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [
        SamplingParams(
            max_tokens=num_tokens * setting.times,
            temperature=0.8 * (index % 2),
            top_p=0.95,
            seed=index,
            ignore_eos=True,
            logprobs=5,
            detokenize=False,
        )
        for index in range(len(prompts))
    ]
    order = list(range(len(prompts)))
    arguments = _as_arguments((*COMMON, *setting.flags))
    arguments["kv_cache_memory_bytes"] = setting.pool_mib << 20
    with LLM(model, dtype=dtype, disable_log_stats=False, **arguments) as llm:
        if setting.in_flight > 1:
            random.Random(SEED + setting.in_flight).shuffle(order)
            outputs = llm.generate(
                [asked[i] for i in order], [params[i] for i in order], use_tqdm=False
            )
        else:
            outputs = [llm.generate(asked[i], params[i], use_tqdm=False)[0] for i in order]
        counter = setting.counts.removesuffix("_total")
        count = sum(m.value for m in llm.get_metrics() if m.name == counter and counter)
    answers: list[Any] = [None] * len(prompts)
    for i, output in zip(order, outputs, strict=True):
        answer = output.outputs[0]
        rows = (answer.logprobs or ())[:num_tokens]
        answers[i] = [
            list(answer.token_ids)[:num_tokens],
            [{token: found.logprob for token, found in row.items()} for row in rows],
        ]
    return answers, int(count)


def _as_arguments(flags: Sequence[str]) -> dict[str, Any]:
    """Return flags of ``vllm serve`` as arguments of ``LLM``."""
    words, arguments = iter(flags), {}
    for flag in words:
        name = flag.removeprefix("--").replace("-", "_")
        if name.startswith("no_"):
            arguments[name.removeprefix("no_")] = False
            continue
        value = next(words)
        arguments[name] = json.loads(value) if value[0] in "{0123456789" else value
    return arguments


def main() -> int:
    """Compare all settings with requests one by one; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="deepseek-v4", help="A folder or GGUF file; of 1,000 tokens at least."
    )
    parser.add_argument("--shape", choices=[*SHAPES, V41, *DRAFTING], help="In place of --model.")
    parser.add_argument("--stored", type=_check_stored, help="How --shape qwen3 is kept.")
    parser.add_argument("--dtype", default="auto", help="As the server's.")
    parser.add_argument("--quantization", help="As the server's.")
    parser.add_argument("--kv-cache-dtype", default="auto", help="As the server's.")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--settings", help="All that the model can run, if not given.")
    parser.add_argument("--offline", action="store_true", help="Engines in this process.")
    parser.add_argument("--pool-mib", type=int, default=4, help="Of settings that preempt.")
    args = parser.parse_args()
    if args.offline:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    answer = answer_offline if args.offline else answer_with
    settings = SETTINGS | (MTP_SETTINGS if args.shape in DRAFTING else {})
    num_ids = VOCAB_SIZE if args.shape else 1000
    if args.shape == V41:
        # The last id stands for images.
        num_ids = BYTE_VOCAB - 1
    prompts = make_prompts(args.requests, num_ids)
    equal: dict[str, int] = {}
    counted: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), args.model
        if args.shape:
            model = str(folder / "model")
            model = str(write_shape(args.shape, Path(model), args.stored))
        own = () if args.quantization is None else ("--quantization", args.quantization)
        own = (*own, "--kv-cache-dtype", args.kv_cache_dtype)
        alone_with = replace(ALONE, flags=(*ALONE.flags, *own))
        alone, _ = answer(folder, model, args.dtype, prompts, args.tokens, alone_with)
        for name in args.settings.split(",") if args.settings else settings:
            setting = replace(settings[name], flags=(*settings[name].flags, *own))
            if setting.counts == PREEMPTIONS:
                setting = replace(setting, pool_mib=args.pool_mib)
            answers, count = answer(folder, model, args.dtype, prompts, args.tokens, setting)
            while not count and setting.counts == PREEMPTIONS and setting.pool_mib > 1:
                # Small rows leave room in this pool.
                setting = replace(setting, pool_mib=setting.pool_mib // 2)
                answers, count = answer(folder, model, args.dtype, prompts, args.tokens, setting)
            equal[name] = sum(a == b for a, b in zip(answers, alone, strict=True))
            if setting.counts:
                counted[f"{name}_counted"] = count
    options = {
        "model": args.shape or args.model,
        "stored": args.stored,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "rounds_inputs": envs.VLLM_CPU_INT4_W4A8,
        "requests": args.requests,
        "tokens": args.tokens,
        "offline": args.offline,
    }
    print_result("same_bits", options, equal | counted)
    return int(any(count < args.requests for count in equal.values()) or not all(counted.values()))


if __name__ == "__main__":
    sys.exit(main())
