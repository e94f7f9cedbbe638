"""Every way for an answer to end, inside a step that brings several tokens."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_checkpoint import VOCAB_SIZE
from tests.v1.engine.fakes import EOS, make_backend
from tests.v1.metrics.values import values_of
from tests.v1.spec_decode.tiny_engine import NGRAM, Session, make_config, make_core, mtp
from vllm.config import VllmConfig
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.launch import launch_sync_engine_core
from vllm.v1.engine.llm_engine import LLMEngine

pytestmark = pytest.mark.slow

NUM_TOKENS = 40
METHODS: dict[str, dict[str, Any]] = {"mtp": mtp(4), "ngram": NGRAM}


def make_prompt() -> list[int]:
    """A prompt whose answer hardly repeats itself, with text of its own for prompt lookup."""
    rng = random.Random(4)
    return [rng.randrange(VOCAB_SIZE) for _ in range(40)]


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **{"max_tokens": NUM_TOKENS, "ignore_eos": True, **more})


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Session:
    return Session(make_core(checkpoint, None))


@pytest.fixture(scope="module", params=sorted(METHODS))
def drafted(checkpoint: Path, request: pytest.FixtureRequest) -> Session:
    return Session(make_core(checkpoint, METHODS[request.param]))


@pytest.fixture(scope="module")
def prompt(plain: Session) -> list[int]:
    """What ngram can look up: the answer itself stands in the prompt."""
    first = make_prompt()
    answer = plain.serve(first, greedy())
    return first + answer.tokens + first


def find_cuts(sizes: list[int], tokens: list[int]) -> list[int]:
    """Return places of tokens, each new in the answer, that are not the last of their step."""
    ends, total = set(), 0
    for size in sizes:
        total += size
        ends.add(total - 1)
    return [i for i, t in enumerate(tokens) if i not in ends and t not in tokens[:i]]


@pytest.mark.parametrize("how", ["stop token", "end token", "max_tokens", "min_tokens"])
def test_a_step_is_cut_where_the_answer_ends(
    how: str, plain: Session, drafted: Session, prompt: list[int]
) -> None:
    free = drafted.serve(prompt, greedy())
    assert free.tokens == plain.serve(prompt, greedy()).tokens
    cuts = find_cuts(free.sizes, free.tokens)
    assert len(cuts) >= 3, free.sizes
    for place in (cuts[0], cuts[len(cuts) // 2], cuts[-1]):
        token = free.tokens[place]
        params = {
            "stop token": greedy(stop_token_ids=[token]),
            "end token": greedy(eos_token_id=token, ignore_eos=False),
            "max_tokens": greedy(max_tokens=place + 1),
            "min_tokens": greedy(stop_token_ids=[token], min_tokens=place + 2),
        }[how]
        actual = drafted.serve(prompt, params)
        expected = plain.serve(prompt, params)
        assert (actual.tokens, actual.finish) == (expected.tokens, expected.finish)
        if how == "min_tokens":
            # The token was refused where it stood.
            assert len(actual.tokens) > place + 1
            assert actual.tokens[place] != token
        else:
            assert actual.tokens == free.tokens[: place + 1]
            assert actual.finish == ("length" if how == "max_tokens" else "stop")
            assert actual.sizes[:-1] == free.sizes[: len(actual.sizes) - 1]
            assert actual.sizes[-1] < free.sizes[len(actual.sizes) - 1], "cut inside a draft"
    for session in (plain, drafted):
        assert session.core.scheduler.kv_cache_manager.usage == 0


def run(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    engine.add_request("r", prompt, params)
    last: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        last = engine.step() or last
    # The step that tells the core of an abort.
    engine.step()
    return last[-1]


@pytest.fixture(scope="module")
def engines(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[LLMEngine]]:
    folder = tmp_path_factory.mktemp("with_tokenizer")
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    make_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    made = []
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        for raw in (None, *METHODS.values()):
            config: VllmConfig = make_config(folder, raw)
            made.append(LLMEngine(config, launch_sync_engine_core(config)))
    yield made
    for engine in made:
        engine.shutdown()


def test_stop_strings(engines: list[LLMEngine], prompt: list[int]) -> None:
    plain, *others = engines
    free = run(plain, prompt, greedy()).outputs[0]
    text = free.text
    # Most begin in one token and end in another; U+FFFD is no text of the model's.
    pairs = (text[i : i + 2] for i in range(2, len(text) - 1))
    stops = [pair for pair in pairs if "\ufffd" not in pair][:4]
    assert len(stops) >= 3
    for stop in stops:
        expected = run(plain, prompt, greedy(stop=[stop])).outputs[0]
        assert expected.stop_reason == stop
        for engine in others:
            actual = run(engine, prompt, greedy(stop=[stop])).outputs[0]
            assert actual.text == expected.text
            assert list(actual.token_ids) == list(expected.token_ids)
            assert (actual.finish_reason, actual.stop_reason) == ("stop", stop)


def test_acceptance_of_a_request(engines: list[LLMEngine], prompt: list[int]) -> None:
    plain, *others = engines
    metrics = run(plain, prompt, greedy()).metrics
    assert metrics is not None
    assert (metrics.num_drafts, metrics.mean_accepted_length) == (0, None)
    for engine in others:
        before = values_of(engine.get_metrics())
        metrics = run(engine, prompt, greedy()).metrics
        after = values_of(engine.get_metrics())
        assert metrics is not None
        counts = {
            "num_drafts": metrics.num_drafts,
            "num_draft_tokens": metrics.num_draft_tokens,
            "num_accepted_tokens": metrics.num_accepted_tokens,
        }
        for name, count in counts.items():
            key = f"vllm:spec_decode_{name}"
            # Drafts behind the last token count for the engine alone.
            assert 0 < count <= after[key] - before[key] <= count + 4
        assert metrics.mean_accepted_length == 1 + metrics.num_accepted_tokens / metrics.num_drafts
        assert metrics.num_generation_tokens == NUM_TOKENS
