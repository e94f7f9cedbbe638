import random
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from tests.tokenizers.family_tokenizers import byte_level, spaced
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import Tokenizer
from vllm.tokenizers.length_bound import LengthBound

WORDS = [
    "a",
    " ",
    "    ",
    "é漢",
    "🏔",
    "<|im_end|>",
    "\n\n",
    "The quick",
    "=" * 40,
    "a\u0301",
    "\ufb01",
]


def with_backend(change: Any) -> tokenizers.Tokenizer:
    backend = byte_level().backend
    change(backend)
    return backend


def texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(WORDS, k=rng.randint(0, 60))) for _ in range(100)]


def test_no_text_has_fewer_tokens() -> None:
    for tokenizer in (byte_level(), Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)):
        for text in texts(1):
            assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text, False))
        assert tokenizer.min_tokens("x" * 100_000) > 1000


@pytest.mark.parametrize(
    "change",
    [
        lambda b: setattr(b, "normalizer", normalizers.NFC()),
        lambda b: setattr(b, "normalizer", normalizers.NFKC()),
        lambda b: setattr(b, "normalizer", normalizers.Sequence([normalizers.NFC()])),
        lambda b: setattr(b, "normalizer", normalizers.Replace("a", "bc")),
        lambda b: b.add_special_tokens([AddedToken("<|x|>", rstrip=True, lstrip=True)]),
        lambda b: b.add_tokens([AddedToken("The quick", normalized=False)]),
    ],
)
def test_steps_that_keep_texts_long(change: Any) -> None:
    backend = with_backend(change)
    bound = LengthBound(backend, knows_every_byte=True)
    for text in [*texts(2), "<|x|>" + " " * 10_000, "a\u0301" * 1000]:
        assert bound.min_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids)
    assert bound.min_tokens("x" * 100_000) > 1000


@pytest.mark.parametrize(
    "change",
    [
        lambda b: setattr(b, "normalizer", normalizers.Strip()),
        lambda b: setattr(b, "normalizer", normalizers.Replace("aaaa", "a")),
        lambda b: setattr(b, "normalizer", normalizers.Replace(tokenizers.Regex(" +"), " ")),
        lambda b: setattr(b, "normalizer", normalizers.StripAccents()),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
    ],
)
def test_steps_that_may_shorten_texts_leave_no_bound(change: Any) -> None:
    assert LengthBound(with_backend(change), knows_every_byte=True).min_tokens("a" * 10**6) == 0


def test_unknown_characters_may_be_one_token() -> None:
    assert spaced().min_tokens("漢" * 10**6) == 0
