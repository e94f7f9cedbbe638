"""A file that is cut, torn or not what it says is refused by name before a value is read."""

import json
from pathlib import Path

import pytest
import torch

from tests.model_executor.model_loader.fakes import save
from vllm.exceptions import CheckpointError
from vllm.model_executor.model_loader.checkpoint_files import read_headers
from vllm.model_executor.model_loader.safetensors_header import StoredTensor, read_header


def write(folder: Path, header: object, num_bytes: int) -> Path:
    text = json.dumps(header).encode()
    file = folder / "model-00003-of-00007.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    return file


def entry(dtype: object, shape: object, start: object, stop: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {"b": torch.zeros(3, dtype=torch.bfloat16), "a": torch.ones(2, 2)}
    file = save(tmp_path, tensors) / "model.safetensors"
    found = read_header(file)
    assert [(t.name, t.dtype, t.shape, t.num_bytes) for t in found] == [
        ("a", "F32", (2, 2), 16),
        ("b", "BF16", (3,), 6),
    ]
    data = file.read_bytes()
    assert data[found[0].offset : found[0].offset + 4] == b"\x00\x00\x80\x3f"
    assert found[1].offset + 6 == len(data)


def test_f4_is_counted_by_value(tmp_path: Path) -> None:
    (tensor,) = read_header(write(tmp_path, {"x": entry("F4", [2, 6], 0, 6)}, 6))
    assert (tensor.shape, tensor.num_bytes) == ((2, 6), 6)


def test_empty_tensors_and_metadata(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "x": entry("F32", [0, 4], 0, 0)}
    assert read_header(write(tmp_path, header, 0))[0].shape == (0, 4)


@pytest.mark.parametrize(
    ("header", "num_bytes", "said"),
    [
        ([], 0, "no JSON object"),
        ({"x": 3}, 4, "describes x"),
        ({"x": {"dtype": "F32", "shape": [1]}}, 4, "describes x"),
        ({"x": entry("F31", [1], 0, 4)}, 4, "describes x"),
        ({"x": entry("F32", [2], 0, 4)}, 4, "the bytes 0..4"),
        ({"x": entry("F32", [-1], 0, -4)}, 4, "gives x"),
        ({"x": entry("F32", [1.0], 0, 4)}, 4, "gives x"),
        ({"x": entry("F32", [True], 0, 4)}, 4, "gives x"),
        ({"x": entry("F32", [1], 4, 8)}, 8, "do not follow"),
        ({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 0, 4)}, 4, "do not follow"),
        ({"x": entry("F32", [1], 0, 4)}, 3, "cut short"),
        ({"x": entry("F32", [1], 0, 4)}, 9, "5 bytes follow"),
    ],
)
def test_headers_that_lie(tmp_path: Path, header: object, num_bytes: int, said: str) -> None:
    file = write(tmp_path, header, num_bytes)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_header(file)
    assert file.name in str(caught.value)
    assert "Download it again" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git-lfs pointer"),
        (b"\x05\x00\x00\x00\x00\x00\x00\x00{]", "cut short"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{]", "no JSON"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00\xff\xfe", "no JSON"),
        (bytes(100), "do not begin with a header"),
        (b"<html>Not found</html>", "do not begin with a header"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        read_header(file)


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "gone.safetensors")


def test_a_shard_that_lacks_what_the_index_promises(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.zeros(2)}, "m-1.safetensors")
    save(tmp_path, {"b": torch.zeros(2)}, "m-2.safetensors")
    weight_map = {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    files = [tmp_path / "m-1.safetensors", tmp_path / "m-2.safetensors"]
    with pytest.raises(CheckpointError, match=r"m-2\.safetensors lacks 1 tensors .*: c\."):
        read_headers(files)
    index.write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}))
    assert {tensor.name for tensor in read_headers(files)} == {"a", "b"}


def test_positions_are_the_files(tmp_path: Path) -> None:
    (tensor,) = read_header(write(tmp_path, {"x": entry("U8", [2], 0, 2)}, 2))
    assert tensor == StoredTensor("x", (2,), "U8", tensor.file, tensor.offset, 2)
    assert tensor.offset == tensor.file.stat().st_size - 2
