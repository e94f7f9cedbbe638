"""Every family over several ranks: the logits of the whole model, read part by part."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.rank_threads import ThreadGroup, run_ranks
from tests.model_executor.models.decoder import reference
from tests.model_executor.models.deepseek_v41.tiny import write_checkpoint
from tests.model_executor.models.harness import PagedHarness
from tests.model_executor.models.hf_reference import random_tokens
from tests.model_executor.models.tiny_config import tiny_config
from tests.model_executor.published import write_published
from tests.tokenizers.family_tokenizers import byte_level
from tools.checkpoints.published_spelling import Spelling
from vllm.distributed.parallel_state import SingleProcessGroup
from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.loader import (
    LoadReport,
    load_model_weights,
    read_stored_tensors,
)
from vllm.model_executor.model_loader.shards import RankShare
from vllm.model_executor.model_loader.stored_weights import StoredWeights
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.attention.ops.registry import get_reference_op

pytestmark = pytest.mark.slow

DECODERS = {
    "llama": (reference.llama(), 2, False),
    "llama-shared-key-heads": (
        reference.llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        4,
        False,
    ),
    "mistral": (reference.mistral(), 2, False),
    "qwen2": (reference.qwen2(), 2, False),
    "qwen3": (reference.qwen3(), 2, False),
    "qwen3-moe": (reference.qwen3_moe(), 2, False),
    "qwen3-moe-spread": (reference.qwen3_moe(), 2, True),
    "gemma3": (reference.gemma3(final_logit_softcapping=2.0), 2, False),
    "gpt-oss": (reference.gpt_oss(), 2, False),
    "gpt-oss-spread": (reference.gpt_oss(), 4, True),
}
_V4: dict[str, Any] = tiny_config(
    hidden_size=64, q_lora_rank=32, o_lora_rank=32, moe_intermediate_size=64
)
_SPELLING = Spelling(block_shape=(32, 32))


def load_rank(
    folder: Path, group: ThreadGroup | SingleProcessGroup, spreads_experts: bool
) -> tuple[Any, LoadReport]:
    """Load a rank's part of a checkpoint, as the worker does."""
    raw = json.loads((folder / "config.json").read_text())
    entry = resolve_model(raw["architectures"])
    config = entry.parse_config(raw)
    entry.check_ranks(config, group.size, spreads_experts)
    share = RankShare(group.rank, group.size, spreads_experts)
    finder = entry.make_shard_finder(config, share)
    stored = read_stored_tensors(folder)
    weights = StoredWeights(stored, raw.get("quantization_config") or {}, finder)
    model = entry.load_model_class()(
        config,
        ops=get_reference_op,
        dtype=torch.float32,
        device="cpu",
        group=group,
        spreads_experts=spreads_experts,
        quantization=weights if weights.is_quantised else None,
    )
    report = load_model_weights(model, folder, use_tqdm=False, stored=stored, find_shard=finder)
    weights.finish_loading()
    return model, report


def compute_logits(
    folder: Path, spreads_experts: bool, group: ThreadGroup | SingleProcessGroup
) -> tuple[torch.Tensor, LoadReport, int]:
    """Run a prompt in two chunks and four single tokens; logits, the load, bytes of the caches."""
    model, report = load_rank(folder, group, spreads_experts)
    model.bind_tokenizer(byte_level())
    raw = json.loads((folder / "config.json").read_text())
    entry = resolve_model(raw["architectures"])

    def find_specs(config: Any, *arguments: Any) -> Any:
        return entry.load_kv_cache_specs()(entry.cut_config(config, group.size), *arguments)

    harness = PagedHarness(model, block_size=32, num_blocks=160, find_specs=find_specs)
    num_bytes = sum(pages[0].nbytes for pages in harness.kv_caches.values())
    tokens = random_tokens(300, 5, model.config.vocab_size - 1)
    return harness.run(tokens, (200, 96, 1, 1, 1, 1)), report, num_bytes


def check_ranks(folder: Path, size: int, spreads_experts: bool) -> list[LoadReport]:
    """Compare the ranks' logits with the whole model's; return how each was loaded, last whole."""
    whole, whole_report, _ = compute_logits(folder, False, SingleProcessGroup())
    results = run_ranks(size, partial(compute_logits, folder, spreads_experts))
    for logits, _, _ in results:
        assert torch.equal(logits, results[0][0]), "ranks must agree bit by bit"
        torch.testing.assert_close(logits, whole, rtol=2e-4, atol=2e-4)
    return [report for _, report, _ in results] + [whole_report]


@pytest.mark.parametrize("name", list(DECODERS))
def test_a_decoder_over_ranks_is_the_whole_model(name: str, tmp_path: Path) -> None:
    raw, size, spreads_experts = DECODERS[name]
    reference.build_hf_model(raw, seed=7).save_pretrained(tmp_path)
    reports = check_ranks(tmp_path, size, spreads_experts)
    whole = reports.pop()
    assert sum(report.num_bytes for report in reports) < 1.3 * whole.num_bytes


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V4 as it is released; below "float" the same numbers as floats."""
    return write_published(_V4, tmp_path_factory.mktemp("v4"), _SPELLING)


@pytest.mark.parametrize("spreads_experts", [False, True])
@pytest.mark.parametrize("is_quantised", [False, True], ids=["plain", "quantised"])
def test_deepseek_v4_over_ranks_is_the_whole_model(
    is_quantised: bool, spreads_experts: bool, published: Path
) -> None:
    folder = published if is_quantised else published.parent / "float"
    reports = check_ranks(folder, 2, spreads_experts)
    whole = reports.pop()
    assert all(report.num_bytes < 0.75 * whole.num_bytes for report in reports)


@pytest.fixture(scope="module")
def v41_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v41")
    sizes = {name: _V4[name] for name in ("hidden_size", "q_lora_rank", "o_lora_rank")}
    write_checkpoint(folder, 4, _SPELLING, moe_intermediate_size=64, **sizes)
    return folder


@pytest.mark.parametrize("spreads_experts", [False, True])
def test_deepseek_v41_over_ranks_is_the_whole_model(
    v41_folder: Path, spreads_experts: bool
) -> None:
    reports = check_ranks(v41_folder, 2, spreads_experts)
    whole = reports.pop()
    assert all(report.num_bytes < 0.9 * whole.num_bytes for report in reports)


def test_deepseek_v4_over_eight_ranks_with_their_own_experts(tmp_path: Path) -> None:
    """As on eight NPUs: a head, a group of outputs and an expert each."""
    heads = {"num_attention_heads": 8, "o_groups": 8, "index_n_heads": 16}
    write_published({**_V4, **heads}, tmp_path, _SPELLING)
    reports = check_ranks(tmp_path / "float", 8, True)
    whole = reports.pop()
    assert all(report.num_bytes < 0.5 * whole.num_bytes for report in reports)


def test_a_cut_through_a_block_of_scales_is_refused(tmp_path: Path) -> None:
    folder = write_published(_V4, tmp_path, Spelling())
    with pytest.raises(ConfigError, match=r"wq_b\.weight.*128 rows.*2 ranks would get 32"):
        run_ranks(2, lambda group: load_rank(folder, group, True))
