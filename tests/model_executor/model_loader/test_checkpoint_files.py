import json

import pytest
import torch

from tests.model_executor.model_loader.fakes import save
from vllm.exceptions import CheckpointError
from vllm.model_executor.model_loader.checkpoint_files import (
    find_weight_files,
    name_some,
    read_headers,
    read_weight_map,
)

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_index(folder, weight_map) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def names(files) -> list[str]:
    return [file.name for file in files]


def test_single_file_is_preferred(tmp_path):
    for name in ("model.safetensors", A, B):
        (tmp_path / name).touch()
    write_index(tmp_path, {"x": A, "y": B})
    assert names(find_weight_files(tmp_path)) == ["model.safetensors"]


def test_shards_of_the_index(tmp_path):
    for name in (A, B, "extra.safetensors"):
        (tmp_path / name).touch()
    write_index(tmp_path, {"x": B, "y": A, "z": B})
    assert names(find_weight_files(tmp_path)) == [A, B]


def test_missing_shard_of_the_index_is_named(tmp_path):
    (tmp_path / A).touch()
    write_index(tmp_path, {"x": A, "y": B})
    with pytest.raises(CheckpointError, match=rf"lacks 1 of its 2 .*{B}"):
        find_weight_files(tmp_path)


def test_shards_without_an_index(tmp_path):
    for name in (A, B):
        (tmp_path / name).touch()
    assert names(find_weight_files(tmp_path)) == [A, B]


def test_missing_shard_without_an_index_is_named(tmp_path):
    (tmp_path / B).touch()
    with pytest.raises(CheckpointError, match=A):
        find_weight_files(tmp_path)


def test_no_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"no weights.*formats \(pytorch_model\.bin\) must"):
        find_weight_files(tmp_path)
    (tmp_path / "m-Q4_0.gguf").touch()
    with pytest.raises(CheckpointError, match=r"give its own path \(.*m-Q4_0\.gguf\)"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"x": 1}}']
    + [json.dumps({"weight_map": {"x": file}}) for file in ("../up.safetensors", "/etc/x", "a/b")],
)
def test_broken_index(tmp_path, text):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        read_weight_map(index)


def test_headers(tmp_path):
    save(tmp_path, {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)})
    save(tmp_path, {"c": torch.zeros((), dtype=torch.int64)}, "more.safetensors")
    files = [tmp_path / "model.safetensors", tmp_path / "more.safetensors"]
    found = {t.name: (t.shape, t.dtype, t.file.name) for t in read_headers(files)}
    assert found == {
        "a": ((2, 3), "F32", "model.safetensors"),
        "b": ((4,), "BF16", "model.safetensors"),
        "c": ((), "I64", "more.safetensors"),
    }


def broken(data: bytes) -> list[bytes]:
    return [b"", data[:5], data[:40], data[:-1], b"\xff" * 8 + data[8:], data + b"x"]


@pytest.mark.parametrize("case", range(6))
def test_broken_file_is_named(tmp_path, case):
    save(tmp_path, {"a": torch.zeros(2, 3)})
    file = tmp_path / "model.safetensors"
    file.write_bytes(broken(file.read_bytes())[case])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable"):
        read_headers([file])


def test_name_some():
    assert name_some([]) == ""
    assert name_some(["a", "b"]) == "a, b"
    assert name_some(map(str, range(20))).endswith("18, 19")
    assert name_some(map(str, range(23))).endswith("18, 19 and 3 more")
