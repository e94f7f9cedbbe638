import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tools.checkpoints import make_deepseek_v4
from tools.checkpoints.deepseek_v4_tensors import tensor_specs
from tools.checkpoints.make_deepseek_v4 import CONFIG, CORPUS, EMBEDDED, PAD, SEED, make_weights
from tools.embedded_model.vocabulary import LATE_TOKENS
from vllm.model_executor.model_loader.loader import load_model_weights
from vllm.model_executor.models.registry import resolve_model
from vllm.platforms.cpu import CpuPlatform
from vllm.tokenizers import Tokenizer

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)


def run(out: Path, threads: int) -> None:
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "RAYON_NUM_THREADS": str(threads),
        "PYTHONHASHSEED": str(threads),
    }
    command = [sys.executable, "-m", make_deepseek_v4.__name__, "--out", str(out)]
    subprocess.run(command, check=True, env=environment, cwd=EMBEDDED.parents[2])


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_the_script_makes_the_embedded_files_but_for_the_weights(tmp_path, threads):
    out = tmp_path / "made"
    run(out, threads)
    assert sorted(file.name for file in out.iterdir()) == sorted(FILES)
    for name in FILES:
        if name != "model.safetensors":
            assert (out / name).read_bytes() == (EMBEDDED / name).read_bytes(), name
    assert (out / "model.safetensors").read_bytes() == make_weights(CONFIG, SEED)


def test_the_folder_is_small_and_holds_nothing_else():
    files = list(EMBEDDED.parent.rglob("*"))
    sizes = [f.stat().st_size for f in files if f.is_file() and "__pycache__" not in f.parts]
    assert sum(sizes) <= 6_000_000
    assert sorted(f.name for f in EMBEDDED.iterdir()) == sorted([*FILES, CORPUS.name])


def test_another_seed_makes_other_weights():
    tiny = CONFIG | {"num_hidden_layers": 1, "num_nextn_predict_layers": 0, "vocab_size": 8}
    assert make_weights(tiny, 1) == make_weights(tiny, 1)
    assert make_weights(tiny, 1) != make_weights(tiny, 2)


def test_architecture():
    ratios = CONFIG["compress_ratios"]
    assert len(ratios) == CONFIG["num_hidden_layers"] + CONFIG["num_nextn_predict_layers"]
    assert set(ratios[:-1]) == {0, 4, 128}
    assert ratios[-1] == 0
    assert 0 < CONFIG["num_hash_layers"] < CONFIG["num_hidden_layers"]
    assert CONFIG["sliding_window"] == 128
    assert CONFIG["max_position_embeddings"] == 16_384


def test_types_are_those_of_the_release():
    with safe_open(EMBEDDED / "model.safetensors", "numpy") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}
    assert types["layers.2.attn.wq_a.weight"] == "BF16"
    assert types["layers.2.attn.attn_sink"] == "F32"
    assert types["layers.2.hc_attn_fn"] == "F32"
    assert types["layers.2.attn.compressor.ape"] == "F32"
    assert types["layers.2.ffn.gate.bias"] == "F32"
    assert types["layers.0.ffn.gate.tid2eid"] == "I64"
    assert "layers.0.ffn.gate.bias" not in types
    assert "layers.2.ffn.gate.tid2eid" not in types


def test_values_are_sane():
    with safe_open(EMBEDDED / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        assert torch.isfinite(tensor).all(), name
        # The MTP block's routing is not balanced in training: its biases stay zero.
        if name != "mtp.0.ffn.gate.bias":
            assert tensor.numel() == 1 or tensor.float().std() > 0.001, name
    table = tensors["layers.1.ffn.gate.tid2eid"]
    assert table.min() == 0
    assert table.max() == CONFIG["n_routed_experts"] - 1
    assert all(len(set(row)) == len(row) for row in table.tolist())


def test_rounding_is_bfloat16s():
    values = np.random.RandomState(0).standard_normal(10_000) * 10.0
    bits = np.frombuffer(make_deepseek_v4._to_bytes(values, "BF16"), "<u2").astype(np.int32) << 16
    expected = torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16).float()
    assert np.array_equal(bits.view(np.float32), expected.numpy())


def test_vocabulary():
    tokenizer = Tokenizer.from_folder(EMBEDDED)
    assert tokenizer.vocab_size == CONFIG["vocab_size"]
    assert tokenizer.bos_token_id == CONFIG["bos_token_id"] == 0
    assert tokenizer.eos_token_id == CONFIG["eos_token_id"] == 1
    assert tokenizer.token_to_id(PAD) == CONFIG["pad_token_id"] == 2
    late = [tokenizer.token_to_id(token) for token in LATE_TOKENS]
    assert late == list(range(CONFIG["vocab_size"] - len(late), CONFIG["vocab_size"]))
    text = CORPUS.read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode()) / 2.5


def test_the_model_has_a_slot_for_every_tensor():
    entry = resolve_model(CONFIG["architectures"])
    model = entry.load_model_class()(
        entry.parse_config(CONFIG), ops=CpuPlatform().get_op, dtype=torch.float32, device="cpu"
    )
    slots = {name: tuple(slot.shape) for name, slot in model.weight_slots().items()}
    assert slots == {name: spec.shape for name, spec in tensor_specs(CONFIG).items()}
    report = load_model_weights(model, EMBEDDED)
    assert report.mtp_present
    assert all(torch.isfinite(slot).all() for slot in model.weight_slots().values())
