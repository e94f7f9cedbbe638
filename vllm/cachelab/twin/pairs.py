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
        parts_at_image: Number of the picture at which they part, from 1; None: it is not at one.
    """

    earlier: str
    shared_tokens: int
    parts_before: int | None
    earlier_tokens: int
    parts_at_image: int | None = None


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
        None if is_over else _find_other_image(old, new, num_shared * unit, unit),
    )


def _find_other_image(
    old: RecordedRequest, new: RecordedRequest, begin: int, unit: int
) -> int | None:
    """Return the number of the picture that is another one, in the unit in which prompts part."""
    pairs = zip(old.added.images, new.added.images, strict=False)
    for number, ((offset, count, digest), other) in enumerate(pairs, 1):
        is_there = offset < begin + unit and offset + count > begin
        if is_there and other[:2] == (offset, count) and other[2] != digest:
            return number
    return None


def format_pair(pair: PromptPair) -> Iterator[str]:
    """Yield lines for people."""
    yield f"  compared with {pair.earlier} ({pair.earlier_tokens} tokens with its answer):"
    if pair.parts_before is None:
        yield f"    goes on where the shorter one ends, after {pair.shared_tokens} shared tokens"
    else:
        image = pair.parts_at_image
        where = "" if image is None else f", at picture {image}: it is another one"
        yield (
            f"    shares {pair.shared_tokens} tokens, and parts before token "
            f"{pair.parts_before}{where}"
        )
