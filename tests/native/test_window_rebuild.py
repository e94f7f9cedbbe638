"""Lost windows are computed again, of each layer those rows alone that are right: the same bits."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.model_executor.models.deepseek_v41.test_model import build_both
from tests.model_executor.models.harness import PagedHarness
from tests.model_executor.models.hf_reference import randomize_, sixteen_rate
from tests.model_executor.models.test_window_rebuild import LENGTH, TOKENS, Rebuild
from tests.model_executor.models.tiny_config import tiny_config
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.model_executor.models.deepseek_v41.kv_cache import deepseek_v41_kv_cache_specs
from vllm.v1.attention.ops.registry import get_reference_op

V4_OPTIONS: dict[str, Any] = {"native": 1}
V41_OPTIONS: dict[str, Any] = {"native": 1, "find_specs": deepseek_v41_kv_cache_specs}


@pytest.fixture(scope="module", params=["deepseek-v4", "deepseek-v4.1"])
def case(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any], int]:
    """Returns a model, how it is run, and the tokens that bring its windows back."""
    if request.param == "deepseek-v4":
        raw = sixteen_rate(tiny_config(sliding_window=16, num_hidden_layers=4))
        config = DeepseekV4Config.from_dict(raw)
        model = DeepseekV4ForCausalLM(
            config, ops=get_reference_op, dtype=torch.float32, device="cpu"
        )
        randomize_(model.weight_slots(), config.n_routed_experts, seed=3)
        return model, V4_OPTIONS, 16 + 3 * 15
    return build_both(3)[0], V41_OPTIONS, 8 + 9 * 7


@pytest.fixture(scope="module")
def whole(case: tuple[Any, dict[str, Any], int]) -> torch.Tensor:
    """Returns the logits of the request of ``Rebuild`` from one step."""
    model, options, _ = case
    return PagedHarness(model, num_blocks=200, **options).run(TOKENS, [LENGTH])


@pytest.mark.parametrize("boundary", [192, 203])
@pytest.mark.parametrize("sizes", [[], [30], [20, 5, 1, 3]], ids=str)
def test_rebuilt_windows_have_the_same_bits(
    case: tuple[Any, dict[str, Any], int],
    whole: torch.Tensor,
    boundary: int,
    sizes: Sequence[int],
) -> None:
    model, options, span = case
    rebuild = Rebuild(model, boundary, **options)
    rebuild.run(boundary - span, [*sizes, span - sum(sizes)])
    assert rebuild.largest_error() == 0
    assert rebuild.dense_is_unchanged()
    assert not rebuild.harness.last_streams[: span // 2].any() or sizes, "were all rows computed?"
    request, harness = rebuild.request, rebuild.harness
    request.write_from = ()
    num_left = LENGTH - boundary
    logits = torch.cat([harness.step([(request, n)])[0] for n in (1, 4, num_left - 5)])
    assert torch.equal(logits, whole[boundary:])
    assert not rebuild.dense_is_unchanged()


def test_a_step_may_go_on_beyond_the_boundary_in_company(
    case: tuple[Any, dict[str, Any], int], whole: torch.Tensor
) -> None:
    model, options, span = case
    rebuild = Rebuild(model, 200, **options)
    request, harness = rebuild.request, rebuild.harness
    rebuild.lose(200 - span)
    other = harness.add(request.token_ids[50:120])
    company, logits = harness.step([(other, 70), (request, LENGTH - 200 + span)])
    alone = PagedHarness(model, num_blocks=200, **options)
    assert torch.equal(logits[span:], whole[200:])
    assert torch.equal(company, alone.run(request.token_ids[50:120], [70]))
