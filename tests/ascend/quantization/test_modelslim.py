"""A whole checkpoint: the embedded one, quantised as ModelSlim would, loaded and run."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.ascend.quantization.modelslim_files import quantise_checkpoint
from tests.model_executor.models.harness import PagedHarness, build_model
from vllm.exceptions import CheckpointError, UnsupportedFeatureError
from vllm.model_executor.model_loader.loader import load_model_weights
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm_ascend.ops.registry import get_ascend_op
from vllm_ascend.quantization.description import DESCRIPTION_FILE, parse_description
from vllm_ascend.quantization.modelslim import ModelSlimQuantization, find_quantization

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def embedded() -> Path:
    return Path(resolve_checkpoint("deepseek-v4").path)


@pytest.fixture(scope="module")
def config(embedded: Path) -> DeepseekV4Config:
    return DeepseekV4Config.from_dict(read_hf_config(embedded))


def load(config: DeepseekV4Config, folder: Path, use_nz: bool = False) -> DeepseekV4ForCausalLM:
    quantisation = find_quantization(str(folder), use_nz=use_nz)
    assert quantisation is not None
    model = DeepseekV4ForCausalLM(
        config,
        ops=partial(get_ascend_op),
        dtype=torch.float32,
        device="cpu",
        quantization=quantisation,
    )
    load_model_weights(model, folder, use_tqdm=False)
    quantisation.finish_loading()
    return model


def logits_of(model: DeepseekV4ForCausalLM) -> torch.Tensor:
    tokens = torch.randint(3, 500, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    return PagedHarness(model).run(tokens, [100, 49, 1])


@pytest.mark.parametrize(("skip", "with_offset"), [("", True), (r"shared_experts|wo_a", False)])
def test_quantised_logits_are_close_to_the_dequantised_models(
    tmp_path: Path, embedded: Path, config: DeepseekV4Config, skip: str, with_offset: bool
) -> None:
    meaning = quantise_checkpoint(embedded, tmp_path, skip, with_offset)
    model = load(config, tmp_path, use_nz=True)
    names = model.weight_slots()
    # Attention, experts and MTP are really int8.
    for name in ("layers.0.attn.wq_a", "layers.1.ffn.experts.1.w2", "mtp.0.e_proj"):
        assert names[f"{name}.weight"].dtype == torch.int8
    expected = logits_of(build_model(config, meaning))
    found = logits_of(model)
    # What is left is the rounding of activations to 8 bits, and experts it makes change.
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < 0.1
    shuffled = (found - expected.roll(1, 0)).norm(dim=-1) / expected.norm(dim=-1)
    assert float(shuffled.median()) > 0.5


def test_a_plain_folder_has_no_quantisation(embedded: Path) -> None:
    assert find_quantization(str(embedded), use_nz=False) is None


def test_a_description_that_does_not_fit_the_tensors(
    tmp_path: Path, embedded: Path, config: DeepseekV4Config
) -> None:
    quantise_checkpoint(embedded, tmp_path)
    file = tmp_path / DESCRIPTION_FILE
    schemes = json.loads(file.read_text())
    for suffix in ("weight", "weight_scale", "weight_offset"):
        schemes[f"layers.0.attn.wo_b.{suffix}"] = "FLOAT"
    file.write_text(json.dumps(schemes))
    with pytest.raises(UnsupportedFeatureError, match=r"layers\.0\.attn\.wo_b\.weight.*quantised"):
        load(config, tmp_path)


def test_quantising_the_gate_is_refused(
    tmp_path: Path, embedded: Path, config: DeepseekV4Config
) -> None:
    quantise_checkpoint(embedded, tmp_path)
    file = tmp_path / DESCRIPTION_FILE
    schemes = json.loads(file.read_text())
    for suffix in ("weight", "weight_scale"):
        schemes[f"layers.0.ffn.gate.{suffix}"] = "W8A8_DYNAMIC"
    file.write_text(json.dumps(schemes))
    with pytest.raises(CheckpointError, match=r"layers\.0\.ffn\.gate.*cannot be quantised"):
        load(config, tmp_path)


def test_half_quantised_experts_are_refused() -> None:
    names = ["p.experts.0.w1", "p.experts.0.w2", "p.experts.0.w3", "p.experts.1.w1"]
    raw = {f"{n}.{s}": "W8A8_DYNAMIC" for n in names for s in ("weight", "weight_scale")}
    quantisation = ModelSlimQuantization(parse_description(raw, "d.json"))
    arguments = (2, 8, 8, 1.0, torch.float32, torch.device("cpu"))
    with pytest.raises(UnsupportedFeatureError, match=r"but not p\.experts\.1\.w2"):
        quantisation.make_experts("p.", *arguments)


def test_only_the_shared_expert_quantised_is_refused() -> None:
    raw = {
        f"p.shared_experts.w{i}.{s}": "W8A8_DYNAMIC"
        for i in (1, 2, 3)
        for s in ("weight", "weight_scale")
    }
    quantisation = ModelSlimQuantization(parse_description(raw, "d.json"))
    arguments = (2, 8, 8, 1.0, torch.float32, torch.device("cpu"))
    with pytest.raises(UnsupportedFeatureError, match="quantise both or neither"):
        quantisation.make_experts("p.", *arguments)
