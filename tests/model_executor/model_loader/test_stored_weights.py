"""What published and repacked checkpoints hold in the field: each loads right or is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.models.tiny_config import tiny_config
from tests.model_executor.published import load_stored, read_all, write_published
from tools.checkpoints.published_spelling import Spelling
from vllm.exceptions import (
    CheckpointError,
    UnsupportedFeatureError,
    UnsupportedModelError,
    VllmError,
)
from vllm.model_executor.model_loader.stored_weights import find_block_size
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config

RAW = tiny_config(num_nextn_predict_layers=1, num_hidden_layers=2, compress_ratios=[0, 4, 0])
FP8 = "layers.0.attn.wq_a"
FP4 = "layers.1.ffn.experts.3.w2"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traps")
    return write_published(RAW, folder, Spelling(), max_shard_bytes=1 << 30)


@pytest.fixture
def rewrite(pristine: Path, tmp_path: Path) -> Callable[[Callable[[Tensors], None]], Path]:
    """Changes the tensors of a copy and returns its folder."""

    def apply(change: Callable[[Tensors], None]) -> Path:
        tensors = load_file(pristine / "model.safetensors")
        change(tensors)
        save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((pristine / "config.json").read_text())
        return tmp_path

    return apply


def decoded(folder: Path, name: str) -> torch.Tensor:
    """Returns the matrix of one expert or of wq_a as the model multiplies with it."""
    model = load_stored(folder)
    if name == FP8:
        source = model.layers[0].attn.in_proj._quantised[0].row_source
    else:
        source = model.layers[1].ffn.quantised.experts[3].down
    rows = torch.empty(source.num_rows, source.num_columns)
    source.write_rows(0, rows)
    return rows


@pytest.mark.parametrize("name", [FP8, FP4])
def test_a_missing_scale_is_named(rewrite, name: str) -> None:
    folder = rewrite(lambda tensors: tensors.pop(f"{name}.scale"))
    error = UnsupportedFeatureError if name == FP4 else CheckpointError
    with pytest.raises(error, match=rf"{re.escape(name)}.*scale"):
        load_stored(folder)


@pytest.mark.parametrize("name", [FP8, FP4])
def test_scale_byte_255_is_refused(rewrite, name: str) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{name}.scale"].view(torch.uint8).view(-1)[0] = 255

    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}\.scale holds 1 .*255.*\[0, 0\]"):
        load_stored(rewrite(change))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_float_scale_that_is_no_number_is_refused(rewrite, bad: float) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{FP8}.scale"] = tensors[f"{FP8}.scale"].float()
        tensors[f"{FP8}.scale"].view(-1)[0] = bad

    with pytest.raises(CheckpointError, match=rf"{FP8}\.scale"):
        load_stored(rewrite(change))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_in_fp8_is_refused(rewrite, byte: int) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{FP8}.weight"].view(torch.uint8)[3, 4] = byte

    with pytest.raises(CheckpointError, match=rf"{FP8}\.weight holds NaN"):
        load_stored(rewrite(change))


def test_a_scale_byte_is_an_exponent_and_never_the_number(rewrite, pristine: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{FP8}.scale"].view(torch.uint8).fill_(120)

    stored = read_all(pristine)[f"{FP8}.weight"].float()
    assert torch.equal(decoded(rewrite(change), FP8), stored * 2.0**-7)


def test_e8m0_may_come_as_bytes(rewrite, pristine: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in (FP8, FP4):
            tensors[f"{name}.scale"] = tensors[f"{name}.scale"].view(torch.uint8)

    folder = rewrite(change)
    for name in (FP8, FP4):
        assert torch.equal(decoded(folder, name), decoded(pristine, name))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_fp4_codes_of_either_sign(rewrite, pristine: Path, dtype: torch.dtype) -> None:
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".experts." in n and n.endswith(".weight")]:
            tensors[name] = tensors[name].view(dtype)

    assert torch.equal(decoded(rewrite(change), FP4), decoded(pristine, FP4))


def test_float_scales_of_any_float_type(rewrite, pristine: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):

        def change(tensors: Tensors, dtype: torch.dtype = dtype) -> None:
            for name in (FP8, FP4):
                tensors[f"{name}.scale"] = tensors[f"{name}.scale"].to(dtype)

        folder = rewrite(change)
        for name in (FP8, FP4):
            assert torch.equal(decoded(folder, name), decoded(pristine, name))


def test_the_names_of_transformers_and_of_v3s_scales(rewrite, pristine: Path) -> None:
    def change(tensors: Tensors) -> None:
        prefix = "model.layers.0.self_attn.q_a_proj"
        tensors[f"{prefix}.weight"] = tensors.pop(f"{FP8}.weight")
        tensors[f"{prefix}.weight_scale_inv"] = tensors.pop(f"{FP8}.scale")

    assert torch.equal(decoded(rewrite(change), FP8), decoded(pristine, FP8))


def test_experts_may_differ_among_themselves(rewrite, pristine: Path) -> None:
    values = decoded(pristine, FP4)

    def change(tensors: Tensors) -> None:
        del tensors[f"{FP4}.scale"]
        tensors[f"{FP4}.weight"] = values.bfloat16()

    assert torch.equal(decoded(rewrite(change), FP4), values)


@pytest.mark.parametrize(
    ("name", "shape"),
    [(FP8, (2, 1, 1)), (FP8, (7, 1)), (FP4, (48, 7)), (FP4, (47, 1)), (FP8, (1,)), (FP8, (0, 1))],
)
def test_scales_that_are_no_grid_of_the_matrix(rewrite, name: str, shape) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{name}.scale"] = torch.ones(shape)

    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}\.scale is \["):
        load_stored(rewrite(change))


def test_a_matrix_of_another_shape_is_named(rewrite) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{FP4}.weight"] = tensors[f"{FP4}.weight"][:, :-1]

    with pytest.raises(CheckpointError, match=rf"{re.escape(FP4)}\.weight.*is \[48, 11\].*12\]"):
        load_stored(rewrite(change))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (f"{FP8}.weight", torch.zeros(24, 48, dtype=torch.float8_e5m2)),
        (f"{FP8}.scale", torch.zeros(1, 1, dtype=torch.int32)),
        ("embed.weight", torch.zeros(96, 48, dtype=torch.float8_e4m3fn)),
        ("layers.1.attn.compressor.wkv.weight", torch.zeros(32, 48, dtype=torch.float8_e4m3fn)),
    ],
)
def test_types_that_are_not_supported_are_named(rewrite, name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(VllmError, match=re.escape(name)):
        load_stored(rewrite(lambda tensors: tensors.update({name: tensor})))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_whole_numbers_without_a_config_are_not_taken_for_fp4(rewrite, dtype: torch.dtype) -> None:
    """Such a release lost its quantization_config: a scale more would not help."""

    def change(tensors: Tensors) -> None:
        del tensors[f"{FP8}.scale"]
        codes = tensors[f"{FP8}.weight"].view(torch.uint8)
        tensors[f"{FP8}.weight"] = codes.view(dtype)
        tensors[f"{FP8}.weight_scale"] = torch.ones(len(codes), 1)

    with pytest.raises(UnsupportedFeatureError) as caught:
        load_stored(rewrite(change))
    assert f"{FP8}.weight" in str(caught.value)
    assert "no quantization_config" in str(caught.value)
    assert "FP4" not in str(caught.value)


def test_a_dspark_drafter_is_left_out_and_takes_no_memory(rewrite, caplog) -> None:
    def change(tensors: Tensors) -> None:
        tensors["mtp.0.main_proj.weight"] = torch.zeros(48, 96, dtype=torch.float8_e4m3fn)
        tensors["mtp.0.main_proj.scale"] = torch.ones(1, 1)
        tensors["mtp.2.markov_head.weight"] = torch.zeros(4, 4)

    model = load_stored(rewrite(change))
    assert model.mtp is None
    assert not any(name.startswith("mtp.") for name in model.weight_slots())
    assert "DSpark" in caplog.text


def test_no_memory_for_an_mtp_block_that_is_not_there(rewrite) -> None:
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("mtp.")]:
            del tensors[name]

    assert load_stored(rewrite(change)).mtp is None


def test_half_a_block_is_still_an_error(rewrite) -> None:
    with pytest.raises(CheckpointError, match=r"mtp\.0\.enorm\.weight"):
        load_stored(rewrite(lambda tensors: tensors.pop("mtp.0.enorm.weight")))


def test_tables_of_another_architecture_are_named(rewrite) -> None:
    table = {"layers.1.engram.embed.weight": torch.zeros(2, 2)}
    with pytest.raises(CheckpointError, match=r"1 unexpected: layers\.1\.engram\.embed\.weight"):
        load_stored(rewrite(lambda tensors: tensors.update(table)))


@pytest.mark.parametrize(
    "change",
    [{"compress_ratios": [0, 2, 0]}, {"compress_ratios": [1, 4, 0]}, {"engram_vocab_size": 5}],
)
def test_v41_is_refused_by_its_config(change) -> None:
    with pytest.raises(UnsupportedModelError, match=r"DeepSeek-V4\.1"):
        DeepseekV4Config.from_dict(RAW | change)


def test_plain_checkpoints_need_none_of_this(pristine: Path) -> None:
    model = load_stored(pristine.parent / "float")
    assert model.embed.weight.dtype == torch.float32
    assert model.layers[0].ffn.quantised is None


def test_plain_tensors_beside_quantised_ones_stay_as_stored(pristine: Path) -> None:
    model = load_stored(pristine)
    kept = (model.embed.weight, model.head.weight, model.layers[0].ffn.gate)
    assert {weight.dtype for weight in kept} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("size", "num_blocks", "declared", "expected"),
    [
        (4096, 32, 128, 128),
        (4096, 128, 128, 32),
        (4096, 32, None, 128),
        (4096, 128, None, 32),
        (4096, 256, None, 16),
        (64, 1, 128, 128),
        (48, 2, None, 32),
        (24, 1, None, 32),
        (7168, 56, 128, 128),
        (96, 96, 128, 1),
        (9, 3, None, 4),
        (96, 7, None, None),
    ],
)
def test_block_sizes(size: int, num_blocks: int, declared: int | None, expected) -> None:
    assert find_block_size(size, num_blocks, declared) == expected


def test_an_index_of_many_shards(tmp_path: Path) -> None:
    folder = write_published(RAW, tmp_path, Spelling(), max_shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 5
    assert set(index["weight_map"]) == set(read_all(folder))
    load_stored(folder)
