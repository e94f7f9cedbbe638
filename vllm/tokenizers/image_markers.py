"""Where pictures stand in a prompt: markers of its text, soft tokens of its ids.

    rendered   ...<start_of_image>What is this?            the template writes a marker a picture
    expanded   ...\\n\\n<start_of_image>s..s<end_of_image>\\n\\nWhat is this?
    ids        255999, 262144 x 256, 256000                offset: of the first 262144

The text is expanded and then tokenised once: line breaks around a picture merge with those beside
them, as the model's own processor has it. A marker that a client wrote is text: special tokens of
clients are guarded before rendering, so what is left is the template's (``literal_text``).
"""

from collections.abc import Sequence

from vllm.exceptions import UserInputError
from vllm.multimodal.families import ImageText


def expand_markers(
    rendered: str, text: ImageText, num_tokens: Sequence[int], *, is_of_chat: bool = True
) -> str:
    """Return a prompt whose markers have become what stands for the pictures, in their order.

    Args:
        rendered: The prompt with a marker for each picture.
        text: The family's.
        num_tokens: Soft tokens of each picture.
        is_of_chat: Whether a chat template wrote the markers, and not the client.

    Raises:
        UserInputError: There are more or fewer markers than pictures.
    """
    pieces = rendered.split(text.marker)
    num_markers = len(pieces) - 1
    if num_markers != len(num_tokens) and not is_of_chat:
        raise UserInputError(
            f"The prompt has {num_markers} markers ({text.marker}) for {len(num_tokens)} "
            "picture(s): write one where each picture stands.",
            "prompt",
        )
    if num_markers != len(num_tokens):
        shown = "drops some of them" if num_markers < len(num_tokens) else "writes more"
        raise UserInputError(
            f"The messages have {len(num_tokens)} picture(s), but the prompt has {num_markers} "
            f"places for them ({text.marker}): the chat template {shown}.",
            "messages",
        )
    expanded = [pieces[0]]
    for count, piece in zip(num_tokens, pieces[1:], strict=True):
        expanded += [text.expand(count), piece]
    return "".join(expanded)


def find_offsets(
    token_ids: Sequence[int], placeholder_id: int, num_tokens: Sequence[int]
) -> tuple[int, ...]:
    """Return where each picture's soft tokens begin.

    Args:
        token_ids: Of the prompt.
        placeholder_id: Id of a soft token.
        num_tokens: Soft tokens of each picture, in their order.

    Raises:
        UserInputError: The soft tokens of the prompt are not those of the pictures.
    """
    offsets: list[int] = []
    at = 0
    for count in num_tokens:
        at = _find(token_ids, placeholder_id, at)
        end = at + count
        if at < 0 or any(token_id != placeholder_id for token_id in token_ids[at:end]):
            raise _unequal(token_ids, placeholder_id, num_tokens)
        offsets.append(at)
        at = end
    if _find(token_ids, placeholder_id, at) >= 0 or at > len(token_ids):
        raise _unequal(token_ids, placeholder_id, num_tokens)
    return tuple(offsets)


def _find(token_ids: Sequence[int], token_id: int, at: int) -> int:
    try:
        return token_ids.index(token_id, at)
    except ValueError:
        return -1


def _unequal(
    token_ids: Sequence[int], placeholder_id: int, num_tokens: Sequence[int]
) -> UserInputError:
    return UserInputError(
        f"The prompt has {token_ids.count(placeholder_id)} tokens {placeholder_id} in places where "
        f"its {len(num_tokens)} pictures have {list(num_tokens)}: give each picture its tokens in "
        "one run, or one marker.",
        "prompt",
    )
