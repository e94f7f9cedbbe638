"""What is remembered of a prompt, and how many tokens two of them share."""

import msgspec
import pytest

from vllm.entrypoints.openai.diagnosis.fingerprint import (
    Fingerprint,
    count_shared,
    make_fingerprint,
    owner_digest,
    prefix_digests,
)
from vllm.entrypoints.openai.pipeline.chat_task import ChatTask, PreparedChat
from vllm.entrypoints.openai.prompts import TokenizedPrompt
from vllm.entrypoints.openai.protocol.requests import ChatCompletionRequest
from vllm.tokenizers import ChatOptions

OWNER = owner_digest("acme", "s1")


def fingerprint(token_ids: list[int], messages: int = 1, owner: bytes = OWNER) -> Fingerprint:
    task = ChatTask([{"role": "user", "content": "secret words"}] * messages, ChatOptions())
    chat = PreparedChat(
        prompt=TokenizedPrompt(token_ids),
        in_reasoning=False,
        make_parser=lambda: None,  # type: ignore[arg-type, return-value]
        adapt_params=lambda params: params,
        task=task,
        num_said=len(token_ids),
    )
    return make_fingerprint(chat, ChatCompletionRequest(messages=[]), "tiny", owner)


@pytest.mark.parametrize("num_tokens", [1, 31, 1000, 12_288, 12_289, 30_000, 150_000])
def test_the_shared_tokens_are_counted_down_to_the_stride(num_tokens: int) -> None:
    token_ids = [i * 7 % 129_000 for i in range(num_tokens)]
    held = fingerprint(token_ids)
    assert held.stride <= max(1, num_tokens // 6_000)
    assert count_shared(held, [*token_ids, 5, 6]) == num_tokens // held.stride * held.stride
    for place in {0, num_tokens // 3, num_tokens - 1}:
        other = [*token_ids]
        other[place] += 1
        assert count_shared(held, other) == place // held.stride * held.stride
        assert count_shared(held, token_ids[:place]) == place // held.stride * held.stride


def test_a_fingerprint_is_small_and_holds_no_text_and_no_token() -> None:
    token_ids = list(range(70_000, 370_000))
    held = fingerprint(token_ids, messages=5_000)
    encoded = msgspec.msgpack.encode(held)
    assert len(encoded) < 65_536
    assert held.num_bytes < 65_536
    assert b"secret" not in encoded
    for width in (2, 4, 8):
        assert token_ids[100].to_bytes(4, "little")[:width] * 2 not in encoded
    assert msgspec.msgpack.decode(encoded, type=Fingerprint) == held
    assert prefix_digests([1, 2, 1, 2], OWNER).tolist() != [1, 2, 1, 2]


def test_owners_have_digests_of_their_own() -> None:
    owners = [owner_digest(t, s) for t in (None, "a") for s in (None, "a", "")]
    assert len(set(owners)) == len(owners)
    one, other = fingerprint([1, 2, 3]), fingerprint([1, 2, 3], owner=owners[0])
    assert one.marks != other.marks
    assert one.messages != other.messages
