"""Compiling beside the loop: cached, refused, and bounded whatever the grammar is."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.v1.structured_output.conftest import EOS, VOCAB, Reader
from vllm.exceptions import UserInputError
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import compiler as compiler_module
from vllm.v1.structured_output.compiler import GrammarCompiler
from vllm.v1.structured_output.trial import TrialOrder, TrialProcess

pytestmark = pytest.mark.slow

WAIT_S = 100


@pytest.fixture(scope="module")
def compiler(reader: Reader) -> Iterator[GrammarCompiler]:
    path = str(resolve_checkpoint("deepseek-v4").path)
    made = GrammarCompiler(
        lambda: reader.backend, lambda: TrialProcess(TrialOrder(path, VOCAB, [EOS]))
    )
    yield made
    made.shutdown()


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.submit(StructuredOutputsParams(regex="[a-z]+"))
    assert compiler.submit(StructuredOutputsParams(regex="[a-z]+")) is first
    assert compiler.submit(StructuredOutputsParams(grammar="start: /[a-z]+/")) is not first
    assert not first.result(WAIT_S).matcher.is_error()


def test_the_cache_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_CACHED", 2)
    params = [StructuredOutputsParams(choice=[str(i)]) for i in range(3)]
    futures = [compiler.submit(item) for item in params]
    assert compiler.submit(params[2]) is futures[2]
    assert compiler.submit(params[0]) is not futures[0]


# The first takes all memory, whatever limits the library is given.
HOSTILE: list[dict[str, Any]] = [
    {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}, {"multipleOf": 983}]},
    {"type": "integer", "allOf": [{"multipleOf": p} for p in (997, 991, 983)]},
    {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(8)]} for i in range(8)]},
]


def test_hostile_schemas_are_refused_and_the_next_one_is_not(compiler: GrammarCompiler) -> None:
    futures = [compiler.submit(StructuredOutputsParams(json=schema)) for schema in HOSTILE]
    good = compiler.submit(StructuredOutputsParams(json={"type": "integer"}))
    for future in futures:
        with pytest.raises(UserInputError) as error:
            future.result(WAIT_S)
        assert error.value.param == "structured_outputs"
        assert len(str(error.value)) < 1_000
    assert not good.result(WAIT_S).matcher.is_error()


def test_a_grammar_that_hangs_behind_a_choice_is_refused(compiler: GrammarCompiler) -> None:
    endless = 'start: ("x" | "y") /a+/ "a"'
    future = compiler.submit(StructuredOutputsParams(grammar=endless))
    with pytest.raises(UserInputError, match="A lexeme takes all it can"):
        future.result(WAIT_S)
    # Lexemes of any length that come to an end.
    for text in ('start: ("x" | "y") /a+/ "b"', "start: /[a-z]+/ | /-+/", 'start: "a" start | "b"'):
        future = compiler.submit(StructuredOutputsParams(grammar=text))
        assert not future.result(WAIT_S).matcher.is_error(), text


def test_a_child_that_was_killed_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.submit(StructuredOutputsParams(regex="x")).result(WAIT_S)
    for trial in compiler._trials:
        trial.stop()
    assert not compiler.submit(StructuredOutputsParams(regex="y")).result(WAIT_S).matcher.is_error()
