"""For models without a known format: everything is content."""

from collections.abc import Sequence

from vllm.parser.pieces import ContentText, Piece


class PlainParser:
    """Passes text through."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        """Return the text as content."""
        return [ContentText(text)] if text else []

    def finish(self, finish_reason: str | None) -> list[Piece]:
        """Return nothing: nothing is ever held back."""
        return []
