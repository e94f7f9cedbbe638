"""Batches of token ids and loss weights."""

import random
from dataclasses import dataclass

import tokenizers
import torch
from torch import Tensor

from tools.embedded_model.conversations import Recipe, conversation
from tools.embedded_model.pieces import Pieces

_PAD_ID = 2
ABOUT_TEXT = 1_000_000  # marks from here on are of facts about the whole text: C128's to find


@dataclass
class Batch:
    """Sequences for one step.

    Attributes:
        ids: Token ids [B, L].
        weights: Weight of each id as a target (of the position before) [B, L].
        marks: [B, L]: equal positive marks say the same thing; 0 for the rest.
        looks: [B, L]: the mark that has to be found to say this token; 0 for none.
    """

    ids: Tensor
    weights: Tensor
    marks: Tensor
    looks: Tensor


class Encoder:
    """Encodes pieces, remembering those seen: most are a sentence of few forms."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids by token."""
        return self._tokenizer.get_vocab()

    def ids(self, text: str) -> list[int]:
        """Token ids of one piece."""
        found = self._known.get(text)
        if found is None:
            if len(self._known) > 200_000:
                self._known.clear()
            found = self._tokenizer.encode(text, add_special_tokens=False).ids
            self._known[text] = found
        return found

    def num_tokens(self, pieces: Pieces) -> int:
        """Tokens of all pieces."""
        return sum(len(self.ids(text)) for text, *_ in pieces.parts)

    def encode(self, pieces: Pieces) -> tuple[list[int], list[float], list[int], list[int]]:
        """Token ids, their weights, their marks and what they have to look at."""
        ids: list[int] = []
        weights: list[float] = []
        marks: list[int] = []
        looks: list[int] = []
        numbers: dict[tuple[str, int], int] = {}
        for text, weight, tag, look in pieces.parts:
            found = self.ids(text)
            ids += found
            weights += [weight] * len(found)
            for i in range(len(found)):
                first = ABOUT_TEXT if tag.endswith("/this text") else 1
                marks.append(numbers.setdefault((tag, i), len(numbers) + first) if tag else 0)
            looks += marks[len(looks) :]
            if look:
                looks[-len(found)] = numbers.get((look, 0), 0)
        return ids, weights, marks, looks


def make_batch(
    encoder: Encoder, rng: random.Random, recipe: Recipe, size: int, text_weight: float
) -> Batch:
    """Make ``size`` sequences; a tenth of the tokens without a weight get ``text_weight``."""
    ids = torch.full((size, recipe.length), _PAD_ID)
    weights = torch.zeros(size, recipe.length)
    marks = torch.zeros(size, recipe.length, dtype=torch.long)
    looks = torch.zeros_like(marks)
    for row in range(size):
        found, weight, mark, look = encoder.encode(conversation(rng, recipe, encoder.num_tokens))
        weight = [w or (text_weight if rng.random() < 0.1 else 0.0) for w in weight]
        ids[row, : len(found)] = torch.tensor(found)
        weights[row, : len(found)] = torch.tensor(weight)
        marks[row, : len(found)] = torch.tensor(mark)
        looks[row, : len(found)] = torch.tensor(look)
    weights[:, 0] = 0
    return Batch(ids, weights, marks, looks)
