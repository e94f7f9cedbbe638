"""Two recorded requests: how far the one's prompt goes along with the other."""

from collections.abc import Iterator
from dataclasses import dataclass

from vllm.cachelab.twin.trace_file import RecordedRequest


@dataclass(frozen=True, slots=True)
class PromptPair:
    """What two requests have in common, in whole units.

    Attributes:
        earlier: Id of the one that is compared with, as its client knows it.
        shared_tokens: That both begin with, the earlier one's answer included.
        parts_before: Token before which they part; None: the one goes on where the other ends.
        earlier_tokens: Of the earlier prompt and its answer.
    """

    earlier: str
    shared_tokens: int
    parts_before: int | None
    earlier_tokens: int


def compare_recorded(old: RecordedRequest, new: RecordedRequest, unit: int) -> PromptPair:
    """Compare a request's prompt with an earlier request and its answer.

    Args:
        old: The earlier one.
        new: The other one.
        unit: Tokens under one hash: two prompts part within one of them.
    """
    own = new.hashes[: new.added.num_prompt_tokens // unit]
    pairs = enumerate(zip(own, old.hashes, strict=False))
    num_shared = next((i for i, (a, b) in pairs if a != b), min(len(own), len(old.hashes)))
    is_over = num_shared == min(len(own), len(old.hashes))
    return PromptPair(
        old.response_id,
        num_shared * unit,
        None if is_over else (num_shared + 1) * unit,
        old.added.num_prompt_tokens + (old.num_output_tokens or 0),
    )


def format_pair(pair: PromptPair) -> Iterator[str]:
    """Yield lines for people."""
    yield f"  compared with {pair.earlier} ({pair.earlier_tokens} tokens with its answer):"
    if pair.parts_before is None:
        yield f"    goes on where the shorter one ends, after {pair.shared_tokens} shared tokens"
    else:
        yield f"    shares {pair.shared_tokens} tokens, and parts before token {pair.parts_before}"
