"""DeepSeek-V4.1 through ``LLM``: answers as the reference's, hits to the unit, drafts, a disk."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_executor.models.deepseek_v41.reference import Reference, State
from tests.model_executor.models.deepseek_v41.tiny import (
    BYTE_VOCAB,
    count_block_rows,
    write_checkpoint,
)
from tests.model_executor.models.hf_reference import random_tokens
from tests.v1.engine.test_handover import Pair
from tools.checkpoints.published_spelling import Spelling
from vllm import LLM, SamplingParams
from vllm.cachelab.twin.exact import ExactTwin
from vllm.cachelab.twin.trace_file import read_trace
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.exceptions import CheckpointError, ConfigError, UserInputError
from vllm.model_executor.model_loader.resolve import read_hf_config
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor

pytestmark = pytest.mark.slow

SPELLINGS = {"floats": None, "fp8": Spelling(block_shape=(32, 32))}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Reference]]:
    made = {}
    for name, spelling in SPELLINGS.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, write_checkpoint(folder, 4, spelling)
    return made


@pytest.fixture
def checkpoint(checkpoints: dict[str, tuple[Path, Reference]]) -> tuple[Path, Reference]:
    return checkpoints["fp8"]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")


def open_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(
        model=str(folder),
        **{
            "max_model_len": 512,
            "block_size": 32,
            "max_num_batched_tokens": 512,
            "num_gpu_blocks_override": 300,
            **settings,
        },
    )


def tokens(count: int, seed: int) -> list[int]:
    return random_tokens(count, seed, BYTE_VOCAB - 1)


def ask(llm: LLM, *prompts: list[int], count: int = 8) -> list[tuple[list[int], int | None]]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(asked, params, use_tqdm=False)
    return [(list(out.outputs[0].token_ids), out.num_cached_tokens) for out in outputs]


def assert_greedy(reference: Reference, prompt: list[int], answer: list[int]) -> None:
    logits = reference.step(State(), [*prompt, *answer])
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


@pytest.mark.parametrize(("name", "unit"), [("floats", 32), ("fp8", 32), ("floats", 128)])
def test_answers_and_hits(
    checkpoints: dict[str, tuple[Path, Reference]], name: str, unit: int
) -> None:
    folder, reference = checkpoints[name]
    with open_llm(folder, block_size=unit, max_num_batched_tokens=96) as llm:
        prompts = [tokens(length, length) for length in (unit, unit + 1, 150)]
        cold = ask(llm, *prompts)
        for prompt, (answer, hit) in zip(prompts, cold, strict=True):
            assert hit == 0
            assert_greedy(reference, prompt, answer)
        warm = ask(llm, *prompts)
        assert [answer for answer, _ in warm] == [answer for answer, _ in cold]
        assert [hit for _, hit in warm] == [(len(p) - 1) // unit * unit for p in prompts]
        turn = [*prompts[-1], *cold[-1][0], *tokens(40, 8)]
        ((answer, hit),) = ask(llm, turn)
        # The last token of an answer was never computed.
        assert hit == (150 + 8 - 1) // unit * unit
        assert_greedy(reference, turn, answer)


def test_without_a_prefix_cache_the_decoder_is_lazy(
    checkpoint: tuple[Path, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers above the cut compute a prompt's end alone, and the answers are the same."""
    folder, reference = checkpoint
    monkeypatch.setenv("VLLM_NATIVE", "0")
    counts = count_block_rows(monkeypatch)
    prompts = [tokens(150, 5), tokens(40, 6)]
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 64}
    with open_llm(folder, **settings) as llm:
        for prompt, (answer, _) in zip(prompts, ask(llm, *prompts), strict=True):
            assert_greedy(reference, prompt, answer)
        assert len(set(counts)) > 4, "some layers leave rows out"
        counts.clear()
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        llm.generate([{"prompt_token_ids": prompts[0]}], params, use_tqdm=False)
        # Then the output of every row is read.
        assert counts == [64] * 20 + [22] * 10


@pytest.mark.parametrize("native", [False, True])
def test_the_decoder_is_lazy_beside_a_prefix_cache(
    checkpoint: tuple[Path, Reference], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a prompt checkpoints lack upper windows: they serve those who read nothing soon."""
    folder, reference = checkpoint
    monkeypatch.setenv("VLLM_NATIVE", str(int(native)))
    counts = count_block_rows(monkeypatch)
    first = tokens(700, 5)
    branches = [[*first[:600], *tokens(110, seed)] for seed in (6, 7)]
    with open_llm(folder, max_model_len=1024, max_num_batched_tokens=256) as llm:
        for prompt, expected in zip((first, *branches, first), (0, 512, 576, 672), strict=True):
            ((answer, hit),) = ask(llm, prompt, count=4)
            assert hit == expected
            assert_greedy(reference, prompt, answer)
            if prompt is first and not hit and not native:
                # Five layers compute all rows, five those that a checkpoint at 512 needs on.
                assert 5 * 700 + 5 * 188 < sum(counts[:-30]) < 5 * 700 + 5 * 240


def test_drafts_cost_nothing(checkpoint: tuple[Path, Reference]) -> None:
    folder, reference = checkpoint
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    prompt = [*tokens(12, 3)] * 5
    with open_llm(folder, speculative_config=drafts) as llm:
        ((answer, _),) = ask(llm, prompt, count=12)
        assert_greedy(reference, prompt, answer)
        ((again, hit),) = ask(llm, prompt, count=12)
        assert (again, hit) == (answer, 32)


def test_a_prefix_survives_on_a_disk(checkpoint: tuple[Path, Reference], tmp_path: Path) -> None:
    folder, reference = checkpoint
    prompt = tokens(150, 5)
    results = []
    tier = {"type": "fs", "root_dir": str(tmp_path), "max_size": "64MiB"}
    # Whatever pays on this machine: it is about right answers.
    settings = {"always_restore": True, "warm": 0, "secondary_tiers": [tier]}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    for _ in range(2):
        connector = {**transfer, "kv_connector_extra_config": settings}
        with open_llm(folder, kv_transfer_config=connector) as llm:
            results += ask(llm, prompt)
    assert results[0][0] == results[1][0]
    assert [hit for _, hit in results] == [0, 128]
    assert_greedy(reference, prompt, results[0][0])


def test_the_twin_of_an_engine_hits_what_it_hit(
    checkpoint: tuple[Path, Reference], tmp_path: Path
) -> None:
    """With n-gram drafts, windows that are rebuilt and a pool that evicts, request by request."""
    folder, reference = checkpoint
    path = tmp_path / "trace.jsonl"
    documents = [tokens(700, seed) for seed in (5, 6)]
    prompts = [
        [*document[:length], *tokens(tail, 10 * length + tail)]
        for length, tail in ((600, 90), (500, 10), (250, 40), (600, 20), (690, 5))
        for document in documents
    ]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    settings = {"speculative_config": drafts, "num_gpu_blocks_override": 110}
    with open_llm(folder, max_model_len=1024, cache_trace=str(path), **settings) as llm:
        told = ask(llm, *documents, count=4)
        told += ask(llm, *prompts, count=4)
    for prompt, (answer, _) in zip((*documents, *prompts), told, strict=True):
        assert_greedy(reference, prompt, answer)
    result = ExactTwin(read_trace(path, is_strict=True)).run()
    assert result.diverged_at is None
    assert [result.cached_tokens[number] for number in sorted(result.cached_tokens)] == [
        hit for _, hit in told
    ]
    reasons = {name for stats in result.misses.values() for name in stats.miss_tokens}
    assert {"first_seen", "window_rebuilt", "above_last_boundary"} <= reasons
    assert sum(result.cached_tokens.values()) > 0


class V41Pair(Pair):
    """A prefilling and a decoding engine of one checkpoint."""

    folder: Path

    def make(self, transfer: KVTransferConfig, **settings: Any) -> EngineCore:
        model = ModelConfig(
            str(self.folder),
            path=str(self.folder),
            hf_config=read_hf_config(self.folder),
            max_model_len=512,
        )
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=32, num_gpu_blocks_override=200),
            scheduler_config=SchedulerConfig(
                max_model_len=512, max_num_batched_tokens=96, max_num_seqs=16
            ),
            kv_transfer_config=transfer,
        )
        return EngineCore(config, UniProcExecutor)


def test_a_prefix_is_handed_over(
    checkpoint: tuple[Path, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To an engine that decodes: its windows, entries and index keys; tables are everybody's."""
    folder, reference = checkpoint
    monkeypatch.setattr(V41Pair, "folder", folder, raising=False)
    pair = V41Pair()
    for length in (32, 33, 150, 300):
        prompt = tokens(length, length)
        answer = pair.answer(prompt, 6)
        assert answer.stats is not None
        assert answer.stats.num_external_tokens == (length - 1) // 32 * 32
        assert_greedy(reference, prompt, answer.tokens)
    pair.check_free()
    pair.shutdown()


def test_prompt_log_probabilities_and_images(checkpoint: tuple[Path, Reference]) -> None:
    folder, reference = checkpoint
    prompt = tokens(40, 6)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    with open_llm(folder) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        with pytest.raises(UserInputError, match=str(BYTE_VOCAB - 1)):
            ask(llm, [5, BYTE_VOCAB - 1, 6])
    expected = reference.step(State(), prompt).log_softmax(-1)[range(39), prompt[1:]]
    rows = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    found = [row[token].logprob for row, token in rows]
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-3, rtol=0)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4, engram_layer_ids=[1])
    config = tmp_path / "config.json"
    text = config.read_text()
    count = text.split('"engram_compressed_vocab_size": ')[1].split(",")[0]
    config.write_text(text.replace(count, str(int(count) - 1)))
    with pytest.raises(CheckpointError, match=f"fold to {count}, but"):
        open_llm(tmp_path)


def test_what_is_not_served_is_refused_by_name(checkpoint: tuple[Path, Reference]) -> None:
    folder, _ = checkpoint
    with pytest.raises(ConfigError, match="DSpark drafter"):
        open_llm(folder, speculative_config={"method": "mtp", "num_speculative_tokens": 1})
