"""A quantised DeepSeek-V4 is its dequantised twin, bit for bit, in the memory of its file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_executor.models.harness import PagedHarness, run_with_mtp
from tests.model_executor.models.hf_reference import random_tokens
from tests.model_executor.models.tiny_config import tiny_config
from tests.model_executor.published import (
    decode_plainly,
    fill_plain,
    load_stored,
    read_all,
    write_published,
)
from tools.checkpoints.published_spelling import Spelling
from vllm.model_executor.layers.linear import ReplicatedLinear, StoredLinear
from vllm.model_executor.layers.quantization.packing_storage import PackingStorage
from vllm.model_executor.layers.quantization.stored_matrix import StoredExperts
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.v1.attention.ops.stored import PANEL

RAW: dict[str, Any] = tiny_config(num_nextn_predict_layers=1)
SPELLINGS = {
    "flash": Spelling(),
    "u8": Spelling(fp4_codes=torch.uint8),
    "groups of 16": Spelling(group_size=16),
    "groups of 128": Spelling(group_size=128),
    "base": Spelling(expert_dtype="fp8", float_scales=True),
    "fp8 experts": Spelling(expert_dtype="fp8"),
    "blocks of 16": Spelling(expert_dtype="fp8", block_shape=(16, 16)),
}


@pytest.fixture(scope="module", params=SPELLINGS)
def spelling(request: pytest.FixtureRequest) -> Spelling:
    return SPELLINGS[request.param]


@pytest.fixture(scope="module")
def published(spelling: Spelling, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published(RAW, tmp_path_factory.mktemp("quantised"), spelling)


def packed_matrices(model: DeepseekV4ForCausalLM) -> list[PackingStorage]:
    """Returns the matrices that lie in panels."""
    linears = [m for m in model.modules() if isinstance(m, ReplicatedLinear | StoredLinear)]
    sources = [rows for layer in linears if (rows := layer.find_rows()) is not None]
    leaves = [leaf for rows in sources for leaf in rows.leaves()]
    for module in model.modules():
        leaves += [
            s for e in vars(module).values() if isinstance(e, StoredExperts) for s in e.storages()
        ]
    return [leaf for leaf in leaves if isinstance(leaf, PackingStorage)]


def resident_bytes(model: DeepseekV4ForCausalLM) -> int:
    """Returns the bytes of everything a model holds, each piece of memory once."""
    held = [*model.weight_slots().values(), *model.parameters(), *model.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(storages.values()) + sum(own.packed.nbytes for own in packed_matrices(model))


def run_all(model: DeepseekV4ForCausalLM, chunks: list[int]) -> torch.Tensor:
    harness = PagedHarness(model)
    sequence = harness.add(random_tokens(sum(chunks), 11))
    return torch.cat([harness.step([(sequence, count)])[0] for count in chunks])


@pytest.mark.slow
def test_logits_are_the_twins_bit_for_bit(published: Path, spelling: Spelling) -> None:
    model = load_stored(published)
    twin = fill_plain(RAW, decode_plainly(read_all(published), spelling))
    for chunks in ([150], [1] * 9, [131, 1, 1, 20, 1]):
        assert torch.equal(run_all(model, chunks), run_all(twin, chunks))
    token_ids = random_tokens(141, 5)
    for chunks in ([140], [128, 1, 11]):
        ours, theirs = (run_with_mtp(m, token_ids, chunks) for m in (model, twin))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert ours[0].std() > 0.1


def test_it_takes_the_memory_of_its_file(published: Path) -> None:
    assert len(list(published.glob("*.safetensors"))) > 3
    tensors = read_all(published)
    stored = sum(tensor.nbytes for tensor in tensors.values())
    is_coded = {name: name.endswith(".scale") or t.itemsize == 1 for name, t in tensors.items()}
    plain = sum(tensor.nbytes for name, tensor in tensors.items() if not is_coded[name])
    model = load_stored(published)
    matrices = packed_matrices(model)
    assert 2 * len(matrices) == sum(is_coded.values()), "all lie in panels"
    packed = sum(own.packed.nbytes for own in matrices)
    assert plain - 0.01 * stored < resident_bytes(model) - packed < plain + 0.05 * stored
    assert packed == sum(panel_bytes(own) for own in matrices)


def panel_bytes(own: PackingStorage) -> int:
    """Returns what codes and scales take: outputs fill panels, each with scales of its own."""
    bits = {"e2m1": 4, "e4m3": 8}[own.packed.kind]
    num_groups = -(-own.num_columns // own.packed.group)
    a_row = own.num_columns * bits // 8 + num_groups * own.packed.scales.values.element_size()
    return PANEL * -(-own.num_rows // PANEL) * a_row


def test_a_step_leaves_nothing_decoded_behind(published: Path) -> None:
    model = load_stored(published)
    before = resident_bytes(model)
    run_all(model, [40, 1])
    assert resident_bytes(model) == before


@pytest.mark.slow
def test_bfloat16_activations_stay_near(published: Path) -> None:
    exact = run_all(load_stored(published), [60])
    model = load_stored(published, torch.bfloat16)
    rounded = run_all(model, [60])
    assert rounded.isfinite().all()
    assert torch.nn.functional.cosine_similarity(rounded, exact).median() > 0.99


@pytest.mark.slow
def test_the_config_may_lack_what_describes_the_tensors(tmp_path: Path) -> None:
    folder = write_published(RAW, tmp_path, Spelling())
    file = folder / "config.json"
    expected = run_all(load_stored(folder), [30])
    config = json.loads(file.read_text())
    del config["expert_dtype"]
    file.write_text(json.dumps(config))
    assert torch.equal(run_all(load_stored(folder), [30]), expected)
    del config["quantization_config"]
    file.write_text(json.dumps(config | {"expert_dtype": "fp8"}))
    assert torch.equal(run_all(load_stored(folder), [30]), expected)
