"""The numerical effect of int8 index keys, bounded: random vectors, and the embedded model's."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.int8_indexer import measure
from tests.model_executor.models.harness import PagedHarness, build_model
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.entries import ChosenEntries
from vllm.v1.attention.ops.reference import index_scores, select_entries
from vllm_ascend.ops.row_formats import Int8Rows

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("num_entries", "num_selected"), [(256, 16), (1024, 512)])
def test_few_choices_change(num_entries: int, num_selected: int) -> None:
    shares = measure(num_entries, num_selected, num_queries=64, seed=0)
    print(f"top {num_selected} of {num_entries}: {shares}")
    # Measured 0.7% and 0.3% (bf16: 0.1%, fp8: 2.7% and 1.1%); an unscaled or misread row changes
    # most of them.
    assert 0 < shares["int8"] < 0.015
    assert shares["bf16"] < shares["int8"] < shares["fp8"] < 0.05


class ChoiceCounter:
    """Scores as the reference does; counts the choices that int8 keys would change."""

    def __init__(self, num_selected: int) -> None:
        self.num_selected = num_selected
        self.num_choices = self.num_changed = 0

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, head_weights: torch.Tensor
    ) -> torch.Tensor:
        scores = index_scores(queries, keys, head_weights)
        rows = Int8Rows().encode(keys.flatten(0, 1))
        rounded_keys = Int8Rows().decode(rows, keys.dtype).view_as(keys)
        rounded = index_scores(queries, rounded_keys, head_weights)
        exact = select_entries(scores, self.num_selected)
        self.num_choices += int(exact.sum())
        self.num_changed += int((exact & ~select_entries(rounded, self.num_selected)).sum())
        return scores


def test_few_choices_of_the_embedded_model_change() -> None:
    folder = Path(resolve_checkpoint("deepseek-v4").path)
    config = DeepseekV4Config.from_dict(read_hf_config(folder))
    (file,) = folder.glob("*.safetensors")
    model = build_model(config, load_file(file))
    counter = ChoiceCounter(config.index_topk)
    for module in model.modules():
        if isinstance(module, ChosenEntries):
            module._score = counter
    num_tokens = 6 * 4 * config.index_topk
    tokens = torch.randint(3, 2000, (num_tokens,), generator=torch.Generator().manual_seed(0))
    PagedHarness(model).run(tokens.tolist(), [num_tokens // 2, num_tokens // 2])
    share = counter.num_changed / counter.num_choices
    print(f"embedded model: {share:.4%} of {counter.num_choices} choices change")
    assert 0 < share < 0.03
