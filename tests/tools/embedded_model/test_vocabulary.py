"""The embedded tokenizer is what the data's words need, and can be made again."""

import json
import random

import pytest
import tokenizers

from tools.checkpoints.make_deepseek_v4 import CORPUS, EMBEDDED
from tools.embedded_model import words
from tools.embedded_model.vocabulary import make_tokenizer


@pytest.mark.slow
def test_it_can_be_made_again() -> None:
    made = make_tokenizer(CORPUS.read_text(encoding="utf-8"))
    committed = (EMBEDDED / "tokenizer.json").read_text(encoding="utf-8")
    assert json.loads(made.to_str()) == json.loads(committed)


def test_too_little_text() -> None:
    with pytest.raises(ValueError, match="add text"):
        make_tokenizer("a few words", num_names=10)


def test_codes_are_two_tokens_and_names_few() -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    rng = random.Random(0)
    for _ in range(200):
        assert len(tokenizer.encode(f" {words.code(rng)}", add_special_tokens=False)) == 2
        name = words.name(rng, held_out=True)
        assert len(tokenizer.encode(f" {name}", add_special_tokens=False)) <= 6
