"""The converter to the published spelling."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.model_executor.published import read_all
from tools.checkpoints.published_spelling import Spelling
from tools.checkpoints.quantise import quantise_checkpoint
from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.resolve import resolve_checkpoint

EMBEDDED = Path(resolve_checkpoint("deepseek-v4").path)
FP8, FP4 = torch.float8_e4m3fn, torch.int8
E8M0 = torch.float8_e8m0fnu


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("published")
    quantise_checkpoint(EMBEDDED, out, max_shard_bytes=500_000)
    return out


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("embed.weight", torch.bfloat16),
        ("head.weight", torch.bfloat16),
        ("norm.weight", torch.bfloat16),
        ("hc_head_fn", torch.float32),
        ("layers.1.hc_attn_scale", torch.float32),
        ("layers.1.attn.wq_a.weight", FP8),
        ("layers.1.attn.wq_a.scale", E8M0),
        ("layers.1.attn.wo_a.weight", FP8),
        ("layers.1.attn.attn_sink", torch.float32),
        ("layers.2.attn.compressor.ape", torch.float32),
        ("layers.2.attn.compressor.wkv.weight", torch.bfloat16),
        ("layers.2.attn.indexer.wq_b.weight", FP8),
        ("layers.2.attn.indexer.weights_proj.weight", torch.bfloat16),
        ("layers.1.ffn.gate.tid2eid", torch.int64),
        ("layers.2.ffn.gate.bias", torch.float32),
        ("layers.2.ffn.gate.weight", torch.bfloat16),
        ("layers.2.ffn.experts.5.w2.weight", FP4),
        ("layers.2.ffn.experts.5.w2.scale", E8M0),
        ("layers.2.ffn.shared_experts.w1.weight", FP8),
        ("mtp.0.e_proj.weight", FP8),
        ("mtp.0.ffn.experts.0.w1.weight", FP4),
    ],
)
def test_types_are_those_of_the_release(published: Path, name: str, dtype: torch.dtype) -> None:
    assert read_all(published)[name].dtype == dtype


def test_shapes_are_those_of_the_release(published: Path) -> None:
    tensors = read_all(published)
    floats = load_file(EMBEDDED / "model.safetensors")
    for name, tensor in floats.items():
        stored, scale = tensors[name], tensors.get(name.removesuffix(".weight") + ".scale")
        rows, columns = (*tensor.shape, 0)[:2]
        if stored.dtype == FP4:
            assert stored.shape == (rows, columns // 2)
            assert scale is not None
            assert scale.shape == (rows, -(-columns // 32))
        elif stored.dtype == FP8:
            assert stored.shape == tensor.shape
            assert scale is not None
            assert scale.shape == (-(-rows // 128), -(-columns // 128))
        else:
            assert scale is None
            assert torch.equal(stored, tensor.to(stored.dtype))


def test_config_index_and_other_files(published: Path) -> None:
    config = json.loads((published / "config.json").read_text())
    assert config["expert_dtype"] == "fp4"
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config["compress_ratios"] == [0, 0, 4, 128, 4, 0]
    assert (published / "tokenizer.json").read_bytes() == (EMBEDDED / "tokenizer.json").read_bytes()
    files = {file.name for file in published.glob("*.safetensors")}
    assert len(files) > 3
    index = json.loads((published / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == files
    assert not list(published.glob("*.tmp"))


def test_twice_gives_the_same_bytes(published: Path, tmp_path: Path) -> None:
    quantise_checkpoint(EMBEDDED, tmp_path, max_shard_bytes=500_000)
    for file in published.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / file.name).read_bytes()


def test_one_file_where_it_fits(tmp_path: Path) -> None:
    num_bytes = quantise_checkpoint(EMBEDDED, tmp_path, Spelling(expert_dtype="fp8"))
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert num_bytes == sum(tensor.nbytes for tensor in read_all(tmp_path).values())
    assert json.loads((tmp_path / "config.json").read_text())["expert_dtype"] == "fp8"


def test_what_cannot_be_converted(published: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantised already"):
        quantise_checkpoint(published, tmp_path)
    with pytest.raises(ConfigError, match="the source itself"):
        quantise_checkpoint(EMBEDDED, EMBEDDED)
    with pytest.raises(ConfigError, match="'int4'"):
        Spelling(expert_dtype="int4")
    with pytest.raises(ConfigError, match="must be positive"):
        Spelling(group_size=0)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.checkpoints.quantise", "--source", str(EMBEDDED)]
    root = Path(__file__).resolve().parents[3]
    out = tmp_path / "out"
    options = ["--out", str(out), "--group-size", "16", "--max-shard-bytes", "1M"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=True, cwd=root
    )
    assert json.loads(done.stdout)["num_bytes"] > 1_000_000
    scale = read_all(out)["layers.2.ffn.experts.5.w1.scale"]
    assert scale.shape == (32, 128 // 16)
    refused = subprocess.run(
        [*command, "--out", str(EMBEDDED)], capture_output=True, text=True, check=False, cwd=root
    )
    assert refused.returncode == 2
    assert "quantise: error:" in refused.stderr
