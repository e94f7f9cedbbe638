"""The shared beginning is computed once and hit by all, to the unit, by every kind of cache."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.decisions.conftest import Serve
from tests.model_executor.models.decoder.checkpoints import write_checkpoint

UNIT = 32
WORDS = [f"w{i}" for i in range(60)]


def make_input(num_words: int, seed: int) -> str:
    draws = random.Random(seed)
    return " ".join(draws.choice(WORDS) for _ in range(num_words))


def predicates(count: int, seed: int) -> list[dict[str, Any]]:
    draws = random.Random(seed)
    texts = [
        " ".join(draws.choice(WORDS) for _ in range(draws.randint(1, 30))) for _ in range(count)
    ]
    return [{"type": "predicate", "instructions": f"{i}. {text}?"} for i, text in enumerate(texts)]


def num_shared(prompts: list[list[int]]) -> int:
    columns = enumerate(zip(*prompts, strict=False))
    return next(i for i, column in columns if len(set(column)) > 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek-v4", "qwen3.5", "gemma3", "gpt-oss"])
async def test_every_question_hits_the_input(
    family: str, tmp_path: Path, serve_model: Serve
) -> None:
    model = family
    if family != "deepseek-v4":
        write_checkpoint(family, tmp_path)
        model = str(tmp_path)
    client = await serve_model(
        model,
        block_size=UNIT,
        max_model_len=4096,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=20_000_000,
    )

    async def ask(body: dict[str, Any]) -> tuple[dict[str, Any], list[list[int]]]:
        reply = await client.post("/v1/decisions", json={"return_prompt_token_ids": True, **body})
        assert reply.status_code == 200, reply.text
        told = reply.json()
        return told, [answer["prompt_token_ids"] for answer in told["answers"]]

    for num_words, count in ((40, 9), (333, 2), (700, 6)):
        document = make_input(num_words, seed=num_words * count)
        body = {"input": document, "questions": predicates(count, seed=count)}
        first, prompts = await ask(body)
        shared = num_shared(prompts) // UNIT * UNIT
        details = first["usage"]["input_tokens_details"]
        assert details["cached_tokens"] == (count - 1) * shared, (num_words, count)
        again, _ = await ask(body)
        details = again["usage"]["input_tokens_details"]
        assert details["cached_tokens"] == sum((len(p) - 1) // UNIT * UNIT for p in prompts)
        assert again["answers"] == first["answers"]
        # Others about the same: all of them hit, from the first on.
        others, prompts = await ask({**body, "questions": predicates(count, seed=count + 1)})
        details = others["usage"]["input_tokens_details"]
        assert details["cached_tokens"] == count * shared
        alone, _ = await ask({**body, "questions": body["questions"][1:2], "cache_salt": "other"})
        assert alone["usage"]["input_tokens_details"]["cached_tokens"] == 0
        assert alone["answers"] == first["answers"][1:2]
