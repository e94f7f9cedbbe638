"""Tensors of a mapped file: the values safetensors reads, and memory let go."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.model_executor.model_loader.fakes import save
from vllm.model_executor.model_loader.mapped_file import MappedFile
from vllm.model_executor.model_loader.safetensors_header import read_header

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OTHERS = (torch.int64, torch.int32, torch.int8, torch.uint8)


def resident_bytes(file: Path) -> int:
    """Returns how much of a file counts as this process's memory."""
    is_ours, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            is_ours = line.endswith(str(file))
        elif is_ours and first == "Rss:":
            total += int(line.split()[1]) << 10
    return total


def test_values_of_every_type(tmp_path: Path) -> None:
    tensors = {str(t): torch.arange(6).view(2, 3).to(t) for t in (*FLOATS, *OTHERS)}
    tensors["fp8"] = torch.ones(3).to(torch.float8_e4m3fn)
    tensors["scale"] = torch.ones(3).to(torch.float8_e8m0fnu)
    tensors["none"] = torch.zeros(0, 4)
    tensors["one"] = torch.tensor(5.0)
    file = save(tmp_path, tensors) / "model.safetensors"
    expected = load_file(file)
    with MappedFile(file) as mapped:
        for stored in read_header(file):
            found, wanted = mapped.read(stored), expected[stored.name]
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            assert torch.equal(found.float(), wanted.float()), stored.name


def test_values_that_lie_unaligned(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0])
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = tmp_path / "model.safetensors"
    data = b"\x07" + values.numpy().tobytes()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with MappedFile(file) as mapped:
        a, b = (mapped.read(stored) for stored in read_header(file))
    assert a.tolist() == [7]
    assert torch.equal(b, values)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="counts memory as Linux does")
def test_what_was_released_is_no_memory_of_ours(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((1 << 18,), float(i)) for i in range(4)}
    file = save(tmp_path, tensors) / "model.safetensors"
    with MappedFile(file) as mapped:
        peak = 0
        for stored in read_header(file):
            assert mapped.read(stored).sum() == (1 << 18) * int(stored.name[1])
            peak = max(peak, resident_bytes(file))
            mapped.release(stored)
        assert peak >= 1 << 20
        assert peak < 2 << 20
        assert resident_bytes(file) < 1 << 18


def test_a_released_tensor_can_be_read_again(tmp_path: Path) -> None:
    file = save(tmp_path, {"x": torch.arange(9000.0)}) / "model.safetensors"
    (stored,) = read_header(file)
    with MappedFile(file) as mapped:
        for _ in range(2):
            assert torch.equal(mapped.read(stored), torch.arange(9000.0))
            mapped.release(stored)
