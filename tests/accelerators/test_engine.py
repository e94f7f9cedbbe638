"""Whole engines on interpreted kernels and a pretended device: tokens and hits are the CPU's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerators.asking import SHORT_V4, Answers, ask, draw_prompt, find_few_kernels
from tests.accelerators.pretended_gpu import PretendedPlatform, pretending
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
from tools.checkpoints.published_spelling import Spelling
from tools.checkpoints.quantise import quantise_checkpoint
from vllm import LLM, SamplingParams, TokensPrompt, platforms
from vllm.model_executor.layers.quantization.panels import PackedRows
from vllm.model_executor.models.decoder.feed_forward import ExpertBank
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.attention.ops import reference

pytestmark = pytest.mark.slow

CPU, GPU = CpuPlatform(), PretendedPlatform()


@contextmanager
def on_platform(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has engines run on a platform."""
    with monkeypatch.context() as patched:
        patched.setattr(platforms, "get_current_platform", lambda: platform)
        assert platforms.current_platform is platform
        with pretending(patched) if platform is GPU else nullcontext():
            yield


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answers]:
    """Asks an engine on a platform."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")

    def answer(folder: Path, platform: Platform, *arguments: Any, **settings: Any) -> Answers:
        with on_platform(platform, monkeypatch):
            return ask(folder, *arguments, **settings)

    return answer


# A layer of each kind. What llama and qwen3 do is in these too; their kernels:
# tests/accelerators/test_steps.py. Drafts on blocks of Qwen 3.5: the other engines here run them.
KINDS: dict[str, dict[str, Any]] = {
    "gemma3": {"num_hidden_layers": 3},
    "gemma4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_kv_shared_layers": 1,
    },
    "gpt-oss": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 1},
    "qwen3-moe": {"num_hidden_layers": 2},
}
DECODERS = {name: {**FAMILIES[name], **layers} for name, layers in KINDS.items()}
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
    answers = run(tmp_path, GPU, 16)
    assert answers == run(tmp_path, CPU, 16)
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
    answers = run(tmp_path, GPU, 16, 1)
    assert answers == run(tmp_path, CPU, 16, 1)
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
    answers = run(tmp_path, CPU, 16)

    def refuse(*_: object) -> None:
        raise AssertionError("a matrix is unpacked")

    monkeypatch.setattr(PackedRows, "write_rows", refuse)
    # Experts are one product.
    monkeypatch.setattr(ExpertBank, "_run_expert", refuse)
    assert run(tmp_path, GPU, 16) == answers
    assert answers[-1][1] == 32


def test_deepseek_v4_answers_as_on_a_cpu(
    run: Callable[..., Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny(tmp_path / "plain", **SHORT_V4)
    drafted = run(source, GPU, 32, 1, lengths=(35,))
    assert drafted == run(source, CPU, 32, 1, lengths=(35,))
    assert sum(accepted for *_, accepted in drafted)
    # As it is released: FP8, its experts FP4.
    folder = tmp_path / "published"
    quantise_checkpoint(source, folder, Spelling())
    answers = run(folder, CPU, 32)

    def refuse(*_: object) -> None:
        raise AssertionError("experts are multiplied one by one")

    monkeypatch.setattr(reference, "mix_expert_products", refuse)
    # The other kernels ran above.
    monkeypatch.setattr(PretendedPlatform, "get_op", lambda _, name: find_few_kernels(name))
    assert run(folder, GPU, 32) == answers
    assert answers[-1][1] == 32


ASKED = [
    SamplingParams(**{"temperature": 0.0, "max_tokens": 3, **asked})
    for asked in (
        {"logprobs": 3, "prompt_logprobs": 2},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"logit_bias": {5: 3.0}, "bad_words": ["a"], "min_tokens": 2, "stop_token_ids": [7]},
        {"allowed_token_ids": [5, 6, 7, 8]},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 3},
        {"structured_outputs": StructuredOutputsParams(choice=["yes", "no"])},
    )
]


@pytest.mark.parametrize(
    "settings",
    [
        {
            "async_scheduling": True,
            "kv_transfer_config": {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "cpu_bytes_to_use": 1 << 20,
                    "always_restore": True,
                },
            },
        },
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 2,
                "prompt_lookup_min": 1,
            }
        },
    ],
    ids=["async", "ngram"],
)
def test_what_requests_ask_for_is_computed_on_the_device(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_model({**FAMILIES["qwen3"], "num_hidden_layers": 1}, tmp_path, byte_level())
    prompts = [
        TokensPrompt(prompt_token_ids=[*draw_prompt(20), *draw_prompt(4 + i)]) for i in range(6)
    ]

    def answer() -> list[tuple[list[int], int | None]]:
        with LLM(
            str(tmp_path),
            block_size=16,
            max_model_len=64,
            num_gpu_blocks_override=100,
            **settings,
        ) as llm:
            outputs = llm.generate(prompts, ASKED, use_tqdm=False)
            llm.reset_prefix_cache()
            outputs += llm.generate(prompts[1], ASKED[1], use_tqdm=False)
        # When a grammar is compiled, and so beside whom its request runs, is chance.
        return [
            (list(out.outputs[0].token_ids), None if has_grammar else out.num_cached_tokens)
            for out, has_grammar in zip(outputs, [*[False] * 5, True, False], strict=True)
        ]

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with on_platform(CPU, monkeypatch):
        answers = answer()
    with on_platform(GPU, monkeypatch):
        assert answer() == answers
    # What the host's memory kept was brought back to the device.
    assert answers[-1][1] == (16 if "kv_transfer_config" in settings else 0)
