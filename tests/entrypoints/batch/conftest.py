"""The application over a fake engine that the other routes are tested with."""

from tests.entrypoints.openai.conftest import serve, tokenizer

__all__ = ["serve", "tokenizer"]
