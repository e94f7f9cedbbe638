"""The Ascend tree in reference mode behind a real server: it is used, and says the same."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.server_process import ServerProcess

COMPLETIONS = "/v1/completions"
BYTES_LINE = "bytes per block id at --block-size 32"


def _complete(server: ServerProcess, prompt: list[int], max_tokens: int = 16) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 1}
    response = server.post(COMPLETIONS, body)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_platform_is_the_one_asked_for(server: ServerProcess, platform: str) -> None:
    assert (BYTES_LINE in server.log) == (platform == "ascend")


def test_a_resend_hits_at_one_unit(server: ServerProcess) -> None:
    rng = random.Random(7)
    for length in (33, 65, 300):
        prompt = [rng.randrange(10, 2000) for _ in range(length)]
        first, again = (_complete(server, prompt, max_tokens=4) for _ in range(2))
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        details = again["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == (length - 1) // 32 * 32


@pytest.mark.parametrize("platform", ["ascend"], indirect=True)
def test_the_same_tokens_as_the_cpu(
    server: ServerProcess, find_server: Callable[[str], ServerProcess]
) -> None:
    rng = random.Random(11)
    prompts = [[rng.randrange(10, 2000) for _ in range(length)] for length in (5, 70, 150, 700)]
    cpu = find_server("cpu")
    for prompt in prompts:
        ours, theirs = (_complete(s, prompt)["choices"][0] for s in (server, cpu))
        assert ours["text"] == theirs["text"]
        assert ours["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
        assert ours["logprobs"]["token_logprobs"] == pytest.approx(
            theirs["logprobs"]["token_logprobs"], abs=1e-3
        )
