"""What is made of the same blocks changes only with the number that copies of it name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from tests.model_executor.model_loader.gguf_files import Type, gguf
from vllm.model_executor.layers.quantization.interface import MatrixSpec
from vllm.model_executor.model_loader import gguf_weights
from vllm.model_executor.model_loader.gguf_names import read_entries
from vllm.model_executor.model_loader.gguf_weights import GgufWeights
from vllm.utils.gguf_file import read_gguf

LLAMA = {"attention.head_count": 2, "embedding_length": 64}
QWEN = {
    **{"ssm.time_step_rank": 4, "ssm.group_count": 2},
    **{"ssm.state_size": 32, "ssm.inner_size": 128},
}
EXPERT = "model.layers.0.mlp.experts.0"


def write_file(path: Path, own: str, keys: dict[str, int], tensors: dict[str, Any]) -> None:
    """Writes tensors of zeros, by name: rows, columns and type, of one expert if stacked."""
    writer = gguf.GGUFWriter(path, own)
    writer.add_block_count(1)
    for name, number in keys.items():
        writer.add_uint32(f"{own}.{name}", number)
    for name, (rows, columns, kind) in tensors.items():
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        zeros = np.zeros((rows, columns // block * num_bytes), np.uint8)
        writer.add_tensor(name, zeros[None] if "_exps" in name else zeros, raw_dtype=kind)
    if "blk.0.ffn_down.weight" in tensors:
        writer.add_tensor("blk.0.ffn_down.scale", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def digest_matrix(path: Path, name: str, num_rows: int, num_columns: int) -> str:
    """Digests the numbers, and the order of the inputs, that are made of fixed blocks."""
    spec = MatrixSpec(name, num_columns, num_rows, torch.float32, torch.device("cpu"))
    made = GgufWeights(path).make_matrix(spec)
    assert made is not None
    ((_, storage),) = made.named_storages()
    for at, own in enumerate(storage.slots(name).values()):
        if own.dtype == torch.uint8:
            scattered = (torch.arange(own.numel()) + at) * 2_654_435_761 >> 13
            own.copy_((scattered & 63).view(own.shape))
        else:
            own.fill_(0.75)
    storage.check(name)
    rows = torch.empty(num_rows, num_columns)
    storage.write_rows(0, rows)
    order = storage.packed.order
    digest = xxhash.xxh3_64(rows.numpy().tobytes())
    digest.update(b"" if order is None else order.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("own", "keys", "tensors", "name", "expected"),
    [
        (
            *("llama", LLAMA, {"blk.0.attn_q.weight": (64, 64, Type.Q8_0)}),
            *("model.layers.0.self_attn.q_proj", "b794c2b6012ffa2f"),
        ),
        (
            *("qwen35", QWEN, {"blk.0.ssm_out.weight": (64, 128, Type.Q8_0)}),
            *("model.layers.0.linear_attn.out_proj", "c5b0e58deae20e86"),
        ),
        (
            *("llama", LLAMA, {"blk.0.ffn_down.weight": (64, 64, Type.NVFP4)}),
            *("model.layers.0.mlp.down_proj", "5c2d27ab42ba0c79"),
        ),
        (
            "gpt-oss",
            {"expert_count": 1},
            {f"blk.0.ffn_{part}_exps.weight": (32, 64, Type.MXFP4) for part in ("gate", "up")},
            *(f"{EXPERT}.gate_up_proj", "4c8873bbda414b3c"),
        ),
    ],
    ids=["rows", "columns", "whole scale", "interleaved"],
)
def test_what_conversions_make_is_named_by_a_number(
    own: str,
    keys: dict[str, int],
    tensors: dict[str, tuple[int, int, Type]],
    name: str,
    expected: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    write_file(path, own, keys, tensors)
    columns = next(iter(tensors.values()))[1]
    # Where this fails and what is made now is right, raise _CONVERSION: copies of packed matrices
    # on people's disks hold what was made before.
    assert gguf_weights._CONVERSION == 1
    assert digest_matrix(path, name, 64, columns) == expected


def test_a_matrix_of_two_is_of_drafts_if_its_halves_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    halves = [f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up")]
    keys = {"expert_count": 1}
    write_file(one, "gpt-oss", keys, {"blk.0.attn_q.weight": (64, 64, Type.Q8_0)})
    write_file(other, "gpt-oss", keys, dict.fromkeys(halves, (32, 64, Type.MXFP4)))
    monkeypatch.setattr(
        gguf_weights,
        "_read_both",  # no family that has such matrices drafts yet
        lambda *paths: [entry for path in paths for entry in read_entries(read_gguf(path))],
    )
    names = "model.layers.0.self_attn.q_proj", f"{EXPERT}.gate_up_proj"
    assert [GgufWeights(one, other).is_of_drafts(name) for name in names] == [False, True]
    assert [GgufWeights(other, one).is_of_drafts(name) for name in names] == [True, False]
