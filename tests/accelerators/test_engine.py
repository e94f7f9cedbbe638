"""Whole engines on interpreted kernels: greedy tokens and hits are the CPU's."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerators.asking import SHORT_V4, Answers, ask, find_few_kernels
from tests.model_executor.model_loader.packed_formats import FORMATS, Format, write_quantised
from tests.model_executor.models.decoder.checkpoints import FAMILIES, VOCAB_SIZE, write_model
from tests.model_executor.models.decoder.drafting import write_drafting_model
from tests.model_executor.models.decoder.reference import (
    build_hf_model,
    kimi_linear,
    published_tensors,
    qwen3_5,
)
from tests.tokenizers.family_tokenizers import byte_level
from tests.v1.spec_decode.tiny_engine import write_tiny
from vllm.assets.published_spelling import Spelling
from vllm.assets.quantise import quantise_checkpoint
from vllm.model_executor.layers.quantization.panels import PackedRows
from vllm.model_executor.models.decoder.feed_forward import ExpertBank
from vllm.platforms.cuda import CudaReferencePlatform
from vllm.platforms.resolve import get_current_platform
from vllm.v1.attention.ops import reference

pytestmark = pytest.mark.slow


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Answers]]:
    """Asks an engine on a platform."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")

    def answer(folder: Path, platform: str, *arguments: Any, **settings: Any) -> Answers:
        monkeypatch.setenv("VLLM_CUDA_REFERENCE", "1" if platform == "cuda-reference" else "0")
        get_current_platform.cache_clear()
        assert get_current_platform().device_name == platform
        return ask(folder, *arguments, **settings)

    yield answer
    get_current_platform.cache_clear()


# What llama and qwen3 do is in these too; their kernels: tests/accelerators/test_steps.py.
DECODERS = {name: raw for name, raw in FAMILIES.items() if name not in ("llama", "qwen3")}
# Drafts on their own blocks: the other engines of these run them.
del DECODERS["qwen3.5"]
DECODERS["qwen3-next"] = {
    **qwen3_5(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
    ),
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
KIMI = kimi_linear(vocab_size=VOCAB_SIZE)
DECODERS["kimi"] = {
    **KIMI,
    "num_hidden_layers": 2,
    "linear_attn_config": {
        **KIMI["linear_attn_config"],
        "full_attn_layers": [2],
        "kda_layers": [1],
    },
}


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_answers_as_on_a_cpu(
    family: str, run: Callable[..., Answers], tmp_path: Path
) -> None:
    write_model(DECODERS[family], tmp_path, byte_level())
    answers = run(tmp_path, "cuda-reference", 16)
    assert answers == run(tmp_path, "cpu", 16)
    assert answers[-1][1] == 32


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("qwen 3.5", {"layer_types": ["linear_attention", "full_attention"]}),
        (
            "glm",
            {
                "layer_types": ["linear_attention", "indexed_attention"],
                "mlp_layer_types": ["dense", "sparse"],
            },
        ),
    ],
)
def test_drafts_and_what_stands_of_them_are_a_cpus(
    family: str, layers: dict[str, list[str]], run: Callable[..., Answers], tmp_path: Path
) -> None:
    write_drafting_model(family, tmp_path, num_hidden_layers=2, **layers)
    answers = run(tmp_path, "cuda-reference", 16, 1)
    assert answers == run(tmp_path, "cpu", 16, 1)
    assert answers[-1][1] == 32
    assert sum(accepted for *_, accepted in answers)


SMALL = {
    "hidden_size": 64,
    "moe_intermediate_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
}
W8A8 = Format("int8", 8, 0, scale_type=torch.float32, rounds_inputs=True)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3", FORMATS["gptq-order"]),
        ("llama", W8A8),
        ("qwen3-moe", FORMATS["gptq-order"]),
    ],
    ids=["gptq", "w8a8", "experts in orders of their own"],
)
def test_a_packed_checkpoint_is_served_as_it_is(
    family: str,
    form: Format,
    run: Callable[..., Answers],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = {**FAMILIES[family], **SMALL}
    write_quantised(form, raw, published_tensors(build_hf_model(raw, seed=7)), tmp_path)
    answers = run(tmp_path, "cpu", 16)

    def refuse(*_: object) -> None:
        raise AssertionError("a matrix is unpacked")

    monkeypatch.setattr(PackedRows, "write_rows", refuse)
    # Experts are one product.
    monkeypatch.setattr(ExpertBank, "_run_expert", refuse)
    assert run(tmp_path, "cuda-reference", 16) == answers
    assert answers[-1][1] == 32


def test_deepseek_v4_answers_as_on_a_cpu(
    run: Callable[..., Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny(tmp_path / "plain", **SHORT_V4)
    drafted = run(source, "cuda-reference", 32, 1, lengths=(35,))
    assert drafted == run(source, "cpu", 32, 1, lengths=(35,))
    assert sum(accepted for *_, accepted in drafted)
    # As it is released: FP8, its experts FP4.
    folder = tmp_path / "published"
    quantise_checkpoint(source, folder, Spelling())
    answers = run(folder, "cpu", 32)

    def refuse(*_: object) -> None:
        raise AssertionError("experts are multiplied one by one")

    monkeypatch.setattr(reference, "mix_expert_products", refuse)
    # The other kernels ran above.
    monkeypatch.setattr(CudaReferencePlatform, "get_op", lambda _, name: find_few_kernels(name))
    assert run(folder, "cuda-reference", 32) == answers
    assert answers[-1][1] == 32
