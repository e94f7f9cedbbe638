"""``vllm inspect``: what files hold, and why some are refused."""

import json
from pathlib import Path

import pytest

from tests.model_executor.model_loader.gguf_files import Type, write_gguf
from tests.model_executor.model_loader.test_gguf import make_raw
from tests.model_executor.models.decoder.reference import build_hf_model
from tests.tokenizers.family_tokenizers import byte_level
from vllm.entrypoints.cli.main import main


def write_file(path: Path) -> None:
    raw = make_raw("qwen3-moe") | {"vocab_size": 512}
    state = dict(build_hf_model(raw, seed=7).state_dict())
    write_gguf("qwen3-moe", raw, state, path, [Type.IQ2_XXS, Type.Q2_K, Type.Q8_0], byte_level())


def test_a_file_is_described_and_its_faults_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write_file(path)
    assert main(["inspect", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["served_as"] == "Qwen3MoeForCausalLM"
    assert report["refused"] == []
    assert set(report["types"]) == {"IQ2_XXS", "Q2_K", "Q8_0", "F32"}
    # All are kept in what they take in the file.
    assert report["weights_in_memory_bytes"] == report["weights_in_file_bytes"]
    caches = {int(n): size for n, size in report["cache_bytes_by_context_length"].items()}
    (by_type,) = (own for name, own in report.items() if name.endswith("by_kv_cache_dtype"))
    # What it is served with, as its weights are coded.
    assert caches[max(caches)] == by_type["float16"]
    assert by_type["float32"] == 2 * by_type["float16"] > 0
    head_dim = make_raw("qwen3-moe")["head_dim"]
    assert by_type["int8"] * 4 * head_dim == by_type["float32"] * (head_dim + 4)

    memory = "vllm.entrypoints.cli.inspect.read_host_memory"
    monkeypatch.setattr(memory, lambda: (1000, 1000))
    assert main(["inspect", str(path)]) == 1
    assert "the weights take more memory than this machine has" in capsys.readouterr().out

    data = path.read_bytes()
    path.write_bytes(data.replace(b"qwen3moe", b"qwen9moe"))
    assert main(["inspect", str(path)]) == 1
    assert "architecture 'qwen9moe', which is not served" in capsys.readouterr().out
    name = b"blk.0.attn_q.weight"
    kind = data.index(name) + len(name) + 20
    path.write_bytes(data[:kind] + b"\x09" + data[kind + 1 :])
    assert main(["inspect", str(path)]) == 1
    assert "is of type number 9 (Q8_1)" in capsys.readouterr().out
    path.write_bytes(data[:1000])
    assert main(["inspect", str(path)]) != 0
    assert "is not a readable GGUF file" in capsys.readouterr().err


def test_other_files_are_no_gguf_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "config.json"]) == 2
    assert "ends in .gguf" in capsys.readouterr().err
