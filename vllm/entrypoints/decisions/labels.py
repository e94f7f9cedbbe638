"""What stands for the options in a prompt, as texts and as tokens.

Up to 26 options are letters, each one token in nearly every vocabulary. More are two letters, which
may be one token or two. Whatever the vocabulary does, the labels' tokens form a trie, and each of
its inner nodes is one read of the model:

    A . A      p(AA) = p(A) p(A | A)          reads: behind the prompt, behind the prompt and A,
      . B      p(AB) = p(A) p(B | A)                 behind the prompt and B
    B . A      p(BA) = p(B) p(A | B)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from vllm.exceptions import UnsupportedFeatureError
from vllm.tokenizers import Tokenizer

# What some tokenizers put in front of a text that begins a prompt.
_SPACE_MARK = "\u2581"

TokenPath = tuple[int, ...]


def label_texts(count: int) -> list[str]:
    """Return labels for so many options, all equally long, so that none begins another."""
    letters = ascii_uppercase
    if count <= len(letters):
        return list(letters[:count])
    return [letters[i // len(letters)] + letters[i % len(letters)] for i in range(count)]


@dataclass(frozen=True, slots=True)
class LabelTrie:
    """The tokens of labels.

    Attributes:
        paths: Of each label, in order.
        branches: The tokens that may follow, by what stands before them; the empty path first.
    """

    paths: Sequence[TokenPath]
    branches: Mapping[TokenPath, Sequence[int]]

    @classmethod
    def build(cls, paths: Sequence[TokenPath]) -> "LabelTrie":
        """Lay out labels.

        Raises:
            UnsupportedFeatureError: One label's tokens begin another's: the model's vocabulary
                cannot tell them apart.
        """
        branches: dict[TokenPath, dict[int, None]] = {}
        for path in paths:
            for depth, token_id in enumerate(path):
                branches.setdefault(path[:depth], {})[token_id] = None
        if len(set(paths)) < len(paths) or any(not path or path in branches for path in paths):
            raise UnsupportedFeatureError(
                "This model's vocabulary cannot tell apart the letters that stand for options: "
                "decisions are not possible with it.",
                "model",
            )
        shortest_first = sorted(branches, key=len)
        return cls(tuple(paths), {path: tuple(branches[path]) for path in shortest_first})

    @property
    def depth(self) -> int:
        """Tokens of the longest read behind the prompt."""
        return max(map(len, self.branches))

    def label_logprobs(self, read: Mapping[TokenPath, Mapping[int, float]]) -> list[float]:
        """Return the log probability of each label, in order.

        Args:
            read: By inner node, the log probabilities of what may follow.
        """
        found = []
        for path in self.paths:
            total = 0.0
            for depth, token_id in enumerate(path):
                total += read[path[:depth]][token_id]
            found.append(total)
        return found


def encode_labels(tokenizer: Tokenizer, prompt_end: str, labels: Sequence[str]) -> list[TokenPath]:
    """Return the tokens of labels as they follow a prompt.

    Args:
        tokenizer: The model's.
        prompt_end: The prompt's last characters, from a token's beginning.
        labels: What follows.
    """
    texts = [prompt_end, *(prompt_end + label for label in labels)]
    before, *behind = tokenizer.encode_batch(texts, False)
    paths = []
    for label, token_ids in zip(labels, behind, strict=True):
        if prompt_end and token_ids[: len(before)] == before and len(token_ids) > len(before):
            paths.append(tuple(token_ids[len(before) :]))
        else:
            # The label would join what stands before it, which is in the prompt already.
            paths.append(_encode_alone(tokenizer, label))
    return paths


def _encode_alone(tokenizer: Tokenizer, label: str) -> TokenPath:
    # Behind a letter of its own: a text that begins a prompt may get a space in front.
    token_ids = tokenizer.encode(label, add_special_tokens=False)
    first = tokenizer.backend.id_to_token(token_ids[0]) if len(token_ids) > 1 else None
    return tuple(token_ids[1:] if first == _SPACE_MARK else token_ids)
