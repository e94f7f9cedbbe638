"""The embedded model's tokenizer: byte-level BPE, numbers in pairs of digits, learnt from the data.

Torch-free and deterministic: the corpus is made by the data's own makers from a fixed seed.
"""

import itertools
import random

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tools.embedded_model import facts, words
from tools.embedded_model.pieces import BOS, EOS

PAD = "<｜▁pad▁｜>"
VOCAB_SIZE = 2048
# The order of the release, at the end of the vocabulary. True: hidden when special tokens are
# skipped. The think and tool marks are not, as parsers of the text look for them.
LATE_TOKENS = {
    "<｜fim▁hole｜>": True,
    "<｜fim▁begin｜>": True,
    "<｜fim▁end｜>": True,
    "<｜User｜>": True,
    "<｜Assistant｜>": True,
    "<think>": False,
    "</think>": False,
    "｜DSML｜": False,
    "<｜latest_reminder｜>": True,
    "<｜action｜>": True,
    "<｜query｜>": True,
    "<｜authority｜>": True,
    "<｜domain｜>": True,
    "<｜title｜>": True,
    "<｜read_url｜>": True,
}


def make_tokenizer(
    general_text: str, seed: int = 14, num_names: int = 16000
) -> tokenizers.Tokenizer:
    """Train the tokenizer.

    Args:
        general_text: English that gives plain words their tokens.
        seed: Of the made-up part of the corpus.
        num_names: Names in it.

    Raises:
        ValueError: The corpus is too small for the vocabulary.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r" ?\p{N}{1,2}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(LATE_TOKENS),
        special_tokens=[_added_token(token, special=True) for token in (BOS, EOS, PAD)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(general_text, random.Random(seed), num_names), trainer)
    tokenizer.add_tokens([_added_token(t, special) for t, special in LATE_TOKENS.items()])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"The corpus gives {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}: add text."
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return tokenizer


def _corpus(general_text: str, rng: random.Random, num_names: int) -> list[str]:
    # Every pair of digits, with and without a space before, often enough to be one token each.
    digits = [f"{a}{b}" for a, b in itertools.product("0123456789", repeat=2)]
    numbers = [f"{lead}{d}" for d in [*digits, *"0123456789"] for lead in ("", " ")]
    plain = [
        *(facts.remark(rng) for _ in range(8000)),
        *(
            make(rng, "It").told.replace("|", "")
            for _ in range(300)
            for make in facts.WORD_FACTS.values()
        ),
        *(make(rng, "it").question for _ in range(50) for make in facts.WORD_FACTS.values()),
        *(facts.number_fact(rng, "it").told.replace("|", "") for _ in range(1000)),
        *(facts.number_fact(rng, "it").question for _ in range(1000)),
    ]
    # Names in the two spellings that occur: after a space and at the start of a line.
    called = [words.name(rng, make=words.syllable_name) for _ in range(num_names)]
    lead = [f" {n}" for n in called] + [f" {n.lower()}" for n in called[:1500]] + called[:3000]
    return [*(n for n in numbers for _ in range(400)), *plain, *lead, *([general_text] * 2)]


def _added_token(text: str, special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, normalized=False, special=special)
