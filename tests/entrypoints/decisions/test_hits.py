"""The shared beginning is computed once and hit by all, to the unit, by every kind of cache."""

import asyncio
import json
import math
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
    server = await serve_model(
        model,
        block_size=UNIT,
        max_model_len=4096,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=20_000_000,
    )

    async def ask(body: dict[str, Any]) -> tuple[dict[str, Any], list[list[int]]]:
        reply = await server.client.post(
            "/v1/decisions", json={"return_prompt_token_ids": True, **body}
        )
        assert reply.status_code == 200, reply.text
        told = reply.json()
        return told, [answer["prompt_token_ids"] for answer in told["answers"]]

    for num_words, count in ((40, 7), (400, 3)):
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


@pytest.mark.slow
async def test_more_questions_than_the_pool_has_room_for(serve_model: Serve) -> None:
    """The tails push each other out, and the input stays: all of them hit it."""
    server = await serve_model(
        "deepseek-v4",
        block_size=UNIT,
        max_model_len=1024,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=3_500_000,
    )
    body = {"input": make_input(250, seed=1), "questions": predicates(60, seed=2)}
    reply = await server.client.post(
        "/v1/decisions", json={**body, "return_prompt_token_ids": True}
    )
    assert reply.status_code == 200, reply.text
    told = reply.json()
    prompts = [answer.pop("prompt_token_ids") for answer in told["answers"]]
    shared = num_shared(prompts) // UNIT * UNIT
    assert told["usage"]["input_tokens_details"]["cached_tokens"] == 59 * shared
    alone = {**body, "questions": body["questions"][47:48], "cache_salt": "alone"}
    reply = await server.client.post("/v1/decisions", json=alone)
    assert reply.json()["answers"][0]["probability"] == told["answers"][47]["probability"]


@pytest.mark.slow
async def test_a_client_that_leaves_ends_all_reads(serve_model: Serve) -> None:
    server = await serve_model(
        "deepseek-v4",
        block_size=UNIT,
        max_model_len=2048,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=8_000_000,
    )
    body = {"input": make_input(300, seed=1), "questions": predicates(100, seed=2)}
    for num_begun in (1, 60):
        asking = asyncio.ensure_future(server.client.post("/v1/decisions", json=body))
        while server.engine.num_unfinished_requests < num_begun:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert server.engine.num_unfinished_requests == 0
    reply = await server.client.post("/v1/decisions", json={**body, "questions": predicates(2, 3)})
    assert reply.status_code == 200


TENANTS = {
    "tenants": [
        {"name": "few", "keys": ["few"], "requests_per_minute": 2},
        {"name": "short", "keys": ["short"], "max_queued_requests": 3},
        {"name": "small", "keys": ["small"], "tokens_per_minute": 700},
    ]
}


@pytest.mark.slow
async def test_a_tenant_pays_for_what_differs(serve_model: Serve, tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps(TENANTS))
    server = await serve_model(
        "deepseek-v4",
        block_size=UNIT,
        max_model_len=2048,
        kv_cache_memory_bytes=8_000_000,
        tenants=str(path),
    )

    async def ask(key: str, count: int) -> tuple[int, str]:
        body = {"input": make_input(120, seed=1), "questions": predicates(count, seed=2)}
        headers = {"Authorization": f"Bearer {key}"}
        reply = await server.client.post("/v1/decisions", json=body, headers=headers)
        return reply.status_code, reply.text

    assert [(await ask("few", 9))[0] for _ in range(3)] == [200, 200, 429]
    assert (await ask("short", 3))[0] == 200
    status, text = await ask("short", 4)
    assert status == 429
    assert "this call brings 4" in text
    # The input once, and each question: 600 tokens where the prompts have 1,600.
    assert (await ask("small", 4))[0] == 200
    headers = {"Authorization": "Bearer small"}
    more = {"prompt": [5] * 60, "max_tokens": 1}
    reply = await server.client.post("/v1/completions", json=more, headers=headers)
    assert reply.status_code == 200, reply.text
    assert (await ask("small", 4))[0] == 429


@pytest.mark.slow
async def test_probabilities_are_those_of_the_other_routes(serve_model: Serve) -> None:
    """A label's is that of a completion that may say nothing else, and of a scored prompt."""
    server = await serve_model(
        "deepseek-v4", block_size=UNIT, max_model_len=4096, kv_cache_memory_bytes=12_000_000
    )
    choices = [{"value": f"v{i}"} for i in range(60)]
    questions = [
        *predicates(1, seed=2),
        {"type": "choice", "instructions": "Which of them?", "choices": choices},
    ]
    body = {"input": make_input(60, seed=1), "questions": questions}
    asks = {"return_prompt_token_ids": True, "return_label_logprobs": True}
    reply = await server.client.post("/v1/decisions", json={**body, **asks})
    predicate, choice = reply.json()["answers"]
    read = []
    for label in predicate["label_token_ids"]:
        asked = {"prompt": predicate["prompt_token_ids"], "allowed_token_ids": label}
        reply = await server.client.post(
            "/v1/completions", json={**asked, "max_tokens": 1, "logprobs": 0}
        )
        read += reply.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert predicate["label_logprobs"] == read
    weights = [math.exp(value) for value in read]
    assert predicate["probability"] == pytest.approx(weights[0] / sum(weights), abs=1e-12)
    for place in (0, 31, 59):
        path = choice["label_token_ids"][place]
        asked = {"prompt": [*choice["prompt_token_ids"], *path], "prompt_logprobs": 0}
        reply = await server.client.post("/v1/completions", json={**asked, "max_tokens": 1})
        rows = reply.json()["choices"][0]["prompt_logprobs"][-len(path) :]
        found = sum(next(iter(row.values()))["logprob"] for row in rows)
        assert choice["label_logprobs"][place] == pytest.approx(found, abs=1e-6)
