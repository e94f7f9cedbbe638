"""The tokens that end a thought: its closing tag, and calls that a parser reads inside it."""

from collections.abc import Sequence

from vllm.parser.registry import find_dialect
from vllm.tokenizers import Tokenizer

# What may stand before a mark and share its first token with it.
_BEFORE = ("", " ", "\n", "\n\n", ".", ".\n", ".\n\n", ">", ">\n")


def call_marks(tools: str, names: Sequence[str]) -> list[str]:
    """Return the texts by which a call ends a thought.

    Args:
        tools: Name of the format of tool calls.
        names: Of the functions that may be called.
    """
    dialect = find_dialect(tools)
    if dialect is None or not dialect.ends_reasoning:
        return []
    marks = dict.fromkeys(mark.lstrip("\n") for mark in dialect.marks)
    # A mark that goes on with a name shares its last token with it.
    return [
        text
        for mark in marks
        for text in ([f"{mark}{name}>" for name in names] if mark.endswith("=") else [mark])
    ]


def spell_marks(tokenizer: Tokenizer, marks: Sequence[str]) -> list[list[int]]:
    """Return the rows of tokens that marks are written in, behind whatever text.

    A token of the format's own is a row by itself, for no other text is written in it.
    """
    added = {
        token_id: token.content
        for token_id, token in tokenizer.backend.get_added_tokens_decoder().items()
    }
    rows: dict[tuple[int, ...], None] = {}
    for mark in marks:
        for before in _BEFORE:
            ids = tokenizer.encode(before + mark, False)
            own = next((i for i in ids if len(added.get(i, "")) > 1 and added[i] in mark), None)
            rows[(own,) if own is not None else _behind(tokenizer, ids, before)] = None
    return [list(row) for row in rows if row]


def _behind(tokenizer: Tokenizer, ids: Sequence[int], before: str) -> tuple[int, ...]:
    """The tokens from the one on that holds the first letter behind a text."""
    num_bytes = len(before.encode())
    for i, token_id in enumerate(ids):
        num_bytes -= len(tokenizer.token_bytes(token_id))
        if num_bytes < 0:
            return tuple(ids[i:])
    return ()
