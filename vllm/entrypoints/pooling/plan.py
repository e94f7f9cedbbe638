"""How the served model makes a vector of a text: pooling, further layers, prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from vllm.entrypoints.pooling.vectors import (
    HIGHEST,
    LAST_TOKEN,
    POOLINGS,
    Rows,
    Vector,
    cosine,
    normalise,
)
from vllm.exceptions import UserInputError
from vllm.v1.request_options import PoolingParams


class Layer(Protocol):
    """What is done to a vector behind the pooling."""

    def __call__(self, vector: Vector) -> Vector:
        """Return the vector behind it."""


@dataclass(frozen=True, slots=True)
class Normalise:
    """Gives vectors the length 1."""

    def __call__(self, vector: Vector) -> Vector:
        """Return the vector behind it."""
        return normalise(vector)


@dataclass(frozen=True, slots=True)
class YesNo:
    """How a reranker's answer is read: two tokens, one of which comes next.

    Attributes:
        yes: Id of the token that says that a document is relevant.
        no: Of the other.
    """

    yes: int
    no: int


@dataclass(frozen=True, slots=True)
class VectorPlan:
    """How the served model makes vectors.

    Attributes:
        poolings: Of ``POOLINGS``; several are joined.
        layers: What is done to a vector behind them, in order.
        size: Numbers of a vector.
        max_tokens: Longest text; None: the model's context.
        prompts: Texts to put in front, by name.
        default_prompt: The name of the one for texts of which nothing else is said.
        leaves_prompts_out: Whether a prompt's tokens take no part in a mean.
        lowers: Whether texts are lowercased.
        renders: Whether a text is a user's message of a chat, and its prompt the system's.
        similarity: How two vectors are compared.
        default_size: Numbers of a vector where a request does not say; None: all.
        is_trained: Whether the checkpoint was made for vectors.
        yes_no: How it ranks, where it is a reranker.
        projection: What maps the model's rows to those that are pooled; None: they are the same.
        generates: Whether the model also generates text.
    """

    size: int
    poolings: Sequence[str] = (LAST_TOKEN,)
    layers: Sequence[Layer] = (Normalise(),)
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    leaves_prompts_out: bool = False
    lowers: bool = False
    renders: bool = False
    similarity: str = "cosine"
    default_size: int | None = None
    is_trained: bool = False
    yes_no: YesNo | None = None
    projection: Layer | None = None
    generates: bool = True

    def project(self, rows: Rows) -> Rows:
        """Return rows in the width of vectors."""
        if self.projection is None:
            return rows
        return np.stack([self.projection(row) for row in rows])

    @property
    def is_trained_for_any(self) -> bool:
        """Whether the checkpoint was made for vectors or for scores."""
        return self.is_trained or self.yes_no is not None

    @property
    def normalises(self) -> bool:
        """Whether vectors have length 1."""
        return any(isinstance(layer, Normalise) for layer in self.layers)

    @property
    def params(self) -> PoolingParams:
        """What the engine is asked for."""
        return PoolingParams(all_rows=tuple(self.poolings) != (LAST_TOKEN,))

    def limit(self, max_model_len: int) -> int:
        """Return the tokens of the longest text."""
        return min(self.max_tokens or max_model_len, max_model_len)

    def make_vector(self, rows: Rows, num_prompt_tokens: int, *, normalises: bool = True) -> Vector:
        """Return a text's vector.

        Args:
            rows: What the engine sent.
            num_prompt_tokens: Of the text, those of the prompt in front of it.
            normalises: Whether to do what gives it the length 1, if the model does.
        """
        first = num_prompt_tokens if self.leaves_prompts_out else 0
        # A text that is all prompt is better than none.
        first = min(first, len(rows) - 1)
        # Sums and projections change places: one row is mapped in place of many.
        is_late = HIGHEST not in self.poolings
        rows = rows if is_late else self.project(rows)
        pooled = [POOLINGS[name](rows, first) for name in self.poolings]
        if is_late and self.projection is not None:
            pooled = [self.projection(one) for one in pooled]
        vector = np.concatenate(pooled)
        for layer in self.layers:
            if normalises or not isinstance(layer, Normalise):
                vector = layer(vector)
        return vector

    def cut(self, vector: Vector, size: int | None) -> Vector:
        """Return the beginning of a vector, which has length 1 where the whole has."""
        size = size or self.default_size
        if size is None or size >= len(vector):
            return vector
        return normalise(vector[:size]) if self.normalises else vector[:size]

    def compare(self, one: Vector, other: Vector) -> float:
        """Return how alike two vectors are, by the measure that the checkpoint names."""
        first, second = one.astype(np.float64), other.astype(np.float64)
        if self.similarity == "dot":
            return float((first * second).sum())
        if self.similarity == "euclidean":
            return -float(np.sqrt(np.square(first - second).sum()))
        if self.similarity == "manhattan":
            return -float(np.abs(first - second).sum())
        return cosine(one, other)

    def find_prompt(self, name: str | None, text: str | None, param: str) -> str | None:
        """Return what a request puts in front of its texts; None: nothing.

        Args:
            name: Of one of the checkpoint's prompts.
            text: Or the prompt itself.
            param: The field that names it.

        Raises:
            UserInputError: There is none of that name.
        """
        if text is not None:
            return text
        if name is None:
            name = self.default_prompt
            return None if name is None else self.prompts.get(name)
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none: give the text itself as prompt"
            raise UserInputError(
                f"{param}={name!r} names no prompt of this checkpoint; it has {known}.", param
            )
        return self.prompts[name]

    def check_size(self, size: int | None, param: str) -> None:
        """Refuse a number of dimensions that no vector here has.

        Raises:
            UserInputError: It is out of range.
        """
        if size is not None and not 1 <= size <= self.size:
            raise UserInputError(
                f"{param}={size} is out of range: this model's vectors have {self.size} "
                f"dimensions, so give 1 to {self.size}.",
                param,
            )
