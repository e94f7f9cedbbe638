"""The embedded vocabulary, and grammars compiled for it."""

import pytest

from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import Tokenizer
from vllm.v1.structured_output.backend import Backend
from vllm.v1.structured_output.grammar import Grammar

VOCAB = 2048
EOS = 1


class Reader:
    """Reads texts through grammars."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)
        self.backend = Backend(self.tokenizer, VOCAB, frozenset([EOS]))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def accepts(self, params: StructuredOutputsParams, text: str) -> bool:
        """Whether the text is a whole answer."""
        grammar = Grammar(self.backend.compile(params), frozenset([EOS]))
        return grammar.accept_tokens("q", [*self.encode(text), EOS])


@pytest.fixture(scope="session")
def reader() -> Reader:
    return Reader()
