"""A W8A8 checkpoint over two ranks: about the logits of one, activations rounded by part."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ascend.quantization.modelslim_files import quantise_checkpoint
from tests.distributed.rank_threads import ThreadGroup, run_ranks
from tests.model_executor.models.harness import run_with_mtp
from vllm.distributed.parallel_state import SingleProcessGroup
from vllm.model_executor.model_loader.loader import load_model_weights
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.model_executor.model_loader.shards import RankShare
from vllm.model_executor.models.registry import resolve_model
from vllm_ascend.ops.registry import get_ascend_op
from vllm_ascend.quantization.modelslim import find_quantization

EMBEDDED = Path(resolve_checkpoint("deepseek-v4").path)


def compute_logits(
    folder: Path, group: ThreadGroup | SingleProcessGroup, spreads_experts: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of 150 tokens in three chunks, and those the MTP block drafts behind each."""
    raw: dict[str, Any] = read_hf_config(EMBEDDED)
    entry = resolve_model(raw["architectures"])
    config = entry.parse_config(raw)
    finder = entry.make_shard_finder(config, RankShare(group.rank, group.size, spreads_experts))
    quantisation = find_quantization(str(folder), finder, use_nz=False)
    assert quantisation is not None
    model = entry.load_model_class()(
        config,
        ops=get_ascend_op,
        dtype=torch.float32,
        device="cpu",
        group=group,
        spreads_experts=spreads_experts,
        quantization=quantisation,
    )
    load_model_weights(model, folder, use_tqdm=False, find_shard=finder)
    quantisation.finish_loading()
    tokens = torch.randint(3, 500, (151,), generator=torch.Generator().manual_seed(0)).tolist()
    return run_with_mtp(model, tokens, [100, 49, 1])


@pytest.mark.slow
def test_two_ranks_are_about_one(tmp_path: Path) -> None:
    quantise_checkpoint(EMBEDDED, tmp_path)
    whole = compute_logits(tmp_path, SingleProcessGroup(), False)
    for spread in (False, True):
        ranks = run_ranks(2, lambda group, spread=spread: compute_logits(tmp_path, group, spread))
        for found, other, expected in zip(*ranks, whole, strict=True):
            assert torch.equal(found, other)
            error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
            # What quantising itself costs is 0.033.
            assert float(error.median()) < 0.03
