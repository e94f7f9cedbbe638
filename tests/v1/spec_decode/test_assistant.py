"""The small checkpoint that drafts from its target's keys and values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from tests.model_executor.models.decoder.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.model_executor.models.decoder.reference import gemma4_small
from tests.model_executor.models.hf_reference import random_tokens
from vllm import LLM, SamplingParams
from vllm.config import SpeculativeConfig
from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.loader import load_model_weights
from vllm.model_executor.model_loader.resolve import read_hf_config
from vllm.model_executor.models.gemma4_assistant import (
    Gemma4Assistant,
    find_owners,
    read_assistant,
)
from vllm.model_executor.models.registry import resolve_model

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}


def write_assistant(folder: Path, *, has_clusters: bool) -> Any:
    """Write a random assistant of the tiny model; returns transformers' model."""
    clusters = {"num_centroids": 8, "centroid_intermediate_top_k": 2} if has_clusters else {}
    with pytest.MonkeyPatch.context() as patch:
        # transformers 5.23 refuses to build any: no layer of its own stores keys.
        patch.setattr(
            Gemma4TextConfig,
            "kv_sharing_modes",
            property(lambda config: ["reuse"] * config.num_hidden_layers),
        )
        config = Gemma4AssistantConfig(
            text_config=Gemma4TextConfig(**TEXT),
            backbone_hidden_size=64,
            use_ordered_embeddings=has_clusters,
            **clusters,
        )
        model = Gemma4AssistantForCausalLM(config).train(False)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("token_ordering"):
                tensor.copy_(torch.randperm(len(tensor), generator=generator))
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            is_factor = "norm" in name or name.endswith("scalar")
            tensor.copy_(1 + 0.2 * noise if is_factor else 0.25 * noise)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("has_clusters", [False, True])
def test_drafts_are_those_of_transformers(tmp_path: Path, has_clusters: bool) -> None:
    reference = write_assistant(tmp_path, has_clusters=has_clusters)
    ours = Gemma4Assistant(read_assistant(read_hf_config(tmp_path)), torch.float32)
    load_model_weights(ours, tmp_path, use_tqdm=False)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for position in (1, 9, 15, 40):
        window = min(position, 15)
        shared = {
            "sliding_attention": (draw(1, 1, window, 16), draw(1, 1, window, 16)),
            "full_attention": (draw(1, 1, position, 32), draw(1, 1, position, 32)),
        }
        embedded, hidden = draw(1, 64), draw(1, 64)
        with torch.inference_mode():
            expected = reference(
                inputs_embeds=torch.cat([embedded, hidden], -1)[None],
                position_ids=torch.tensor([[position]]),
                shared_kv_states=shared,
            )
            rows = {k: torch.cat([part[0, 0] for part in pair], -1) for k, pair in shared.items()}
            token, after = ours(
                embedded, hidden, position, [rows[kind] for kind in TEXT["layer_types"]]
            )
        torch.testing.assert_close(after, expected.last_hidden_state[0], atol=1e-4, rtol=0)
        assert token == int(expected.logits[0, -1].argmax())


def answer(
    folder: Path, prompts: list[list[int]], drafts: dict[str, Any] | None, dtype: Any
) -> list[Any]:
    llm = LLM(
        dtype=dtype,
        model=str(folder),
        skip_tokenizer_init=True,
        block_size=16,
        max_model_len=512,
        kv_cache_memory_bytes=4 << 20,
        speculative_config=drafts,
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    again = llm.generate([{"prompt_token_ids": prompts[0]}], params, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in [*outputs, *again]]
    assert again[0].num_cached_tokens == (len(prompts[0]) - 1) // 16 * 16
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_and_hits_are_those_without_drafts(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 the kernels take the weights' memory over, the embedding's too."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    write_checkpoint("gemma4", tmp_path / "target")
    write_assistant(tmp_path / "assistant", has_clusters=True)
    prompts = [random_tokens(n, n, VOCAB_SIZE) for n in (40, 7, 100)]
    drafts = {
        "method": "gemma4_assistant",
        "model": str(tmp_path / "assistant"),
        "num_speculative_tokens": 3,
    }
    expected = answer(tmp_path / "target", prompts, None, dtype)
    assert answer(tmp_path / "target", prompts, drafts, dtype) == expected


def test_an_assistant_of_another_model_is_refused() -> None:
    raw = {"model_type": "gemma4_assistant", "backbone_hidden_size": 64, "text_config": TEXT}
    target = resolve_model(["Gemma4ForCausalLM"]).parse_config(gemma4_small(vocab_size=VOCAB_SIZE))
    assert find_owners(read_assistant(raw), target) == (4, 4, 3)
    with pytest.raises(ConfigError, match="hidden size of 48"):
        find_owners(read_assistant({**raw, "backbone_hidden_size": 48}), target)
    wider = {**raw, "text_config": {**TEXT, "head_dim": 24}}
    with pytest.raises(ConfigError, match="layer 0 of the assistant"):
        find_owners(read_assistant(wider), target)
    with pytest.raises(ConfigError, match="num_centroids"):
        read_assistant({**raw, "use_ordered_embeddings": True, "num_centroids": 7})


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"method": "gemma4_assistant"}, "needs 'model'"),
        ({"method": "gemma4_assistant", "model": "x", "num_speculative_tokens": 9}, "use 1 to 8"),
        ({"method": "gemma4_assistant", "model": "x", "stale_row": "keep"}, "stale_row"),
        ({"method": "gemma4_assistant", "model": "x", "prompt_lookup_max": 3}, "prompt_lookup"),
    ],
)
def test_bad_settings_name_the_field(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SpeculativeConfig.from_dict(raw)
