"""Gemma 4's table of per-layer inputs stays in its file: memory holds rows of tokens that came."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_executor.model_loader.gguf_files import Type, write_gguf
from tests.model_executor.model_loader.test_gguf import load, make_raw
from tests.model_executor.model_loader.test_mapped_file import resident_bytes
from tests.model_executor.models.decoder.building import make_harness
from tests.model_executor.models.decoder.reference import build_hf_model, gemma4_small
from vllm.model_executor.model_loader.loader import load_model_weights, read_stored_tensors
from vllm.model_executor.model_loader.mapped_file import MappedFile
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.registry import resolve_model
from vllm.native.loader import load_library
from vllm.v1.attention.ops.registry import get_reference_op

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc says what is resident"),
]

VOCAB_SIZE = 8192


def make_safetensors(folder: Path) -> tuple[DecoderForCausalLM, Path]:
    # Rows of a page each.
    raw = gemma4_small(vocab_size=VOCAB_SIZE, hidden_size_per_layer_input=128)
    build_hf_model(raw, seed=7).save_pretrained(folder)
    config = resolve_model(raw["architectures"]).parse_config(raw)
    model = DecoderForCausalLM(config, ops=get_reference_op, dtype=torch.float32, device="cpu")
    report = load_model_weights(model, folder, use_tqdm=False)
    file = folder / "model.safetensors"
    table = sum(stored.num_bytes for stored in read_stored_tensors(folder) if is_table(stored.name))
    total = sum(stored.num_bytes for stored in read_stored_tensors(folder))
    ignored = sum(s.num_bytes for s in read_stored_tensors(folder) if s.name in report.ignored)
    # What the start says was loaded is what takes memory.
    assert report.num_bytes == total - table - ignored
    return model, file


def make_gguf(folder: Path) -> tuple[DecoderForCausalLM, Path]:
    raw = make_raw("gemma4-small") | {
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 256,
    }
    state: dict[str, Any] = dict(build_hf_model(raw, seed=7).state_dict())
    state.pop("lm_head.weight", None)
    file = folder / "model.gguf"
    write_gguf("gemma4", raw, state, file, [Type.Q8_0])
    return load(file), file


def is_table(name: str) -> bool:
    return "embed_tokens_per_layer" in name or "per_layer_token_embd" in name


@pytest.fixture(scope="module", params=["safetensors", "gguf"])
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DecoderForCausalLM, Path]:
    folder = tmp_path_factory.mktemp("table")
    return (make_safetensors if request.param == "safetensors" else make_gguf)(folder)


@pytest.mark.parametrize("native", [0, 1])
def test_rows_that_occur_become_resident(
    loaded: tuple[DecoderForCausalLM, Path], native: int
) -> None:
    if native and load_library() is None:
        pytest.skip("make native builds the kernels")
    model, file = loaded
    path = file if file.suffix == ".gguf" else file.parent
    (stored,) = [stored for stored in read_stored_tensors(path) if is_table(stored.name)]
    # Other tokens for each kernel: what one has read is there for the other.
    first = [100 + 4000 * native + 90 * i for i in range(10)]
    before = resident_bytes(file)
    if not native:
        assert before == 0, "loading read the table"
    make_harness(model, native=native).run(first, [10])
    after = resident_bytes(file)
    # How much a kernel maps around a page is its own affair: as much as for these rows alone.
    alone = MappedFile(file).read_rows_at_random(stored)
    assert alone[first].float().isfinite().any()
    least = resident_bytes(file) - after
    assert 0 < after - before <= 2 * least < stored.num_bytes / 2
    del alone
    assert resident_bytes(file) == after
    # The same tokens again need nothing.
    make_harness(model, native=native).run(first[::-1], [3, 7])
    assert resident_bytes(file) == after
