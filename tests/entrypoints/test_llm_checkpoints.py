"""What transformers saves, ``LLM`` serves: the same greedy tokens as its ``generate``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.model_executor.models.hf_reference import (
    PARITY_CONFIGS,
    build_hf_model,
    random_tokens,
    run_reference,
)
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.slow

NUM_TOKENS = 20
# Around the unit, the window and the first entry of a layer of rate 128.
LENGTHS = (5, 33, 127, 128, 200)
# The least gap of a greedy choice, or of a router's or indexer's, that rounding cannot close.
MIN_MARGIN = 1e-5


@pytest.fixture(scope="module")
def reference() -> Any:
    return build_hf_model(PARITY_CONFIGS["hc4-yarn-4-128"], seed=7)


@pytest.fixture(scope="module")
def answers(reference: Any) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what transformers goes on with."""
    pairs = []
    for length in LENGTHS:
        prompt = random_tokens(length, seed=length)
        ids = torch.tensor([prompt])
        whole = reference.generate(
            ids,
            # Given: where it is not, tokens that equal the pad id would be masked.
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()
        margins = run_reference(reference, whole[:-1]).margins
        assert margins.min() > MIN_MARGIN, f"choose another seed for {length} tokens"
        pairs.append((prompt, whole[length:]))
    return pairs


def _save(model: Any, folder: Path, spelling: str) -> None:
    if spelling == "saved":
        model.save_pretrained(folder)
    elif spelling == "sharded":
        model.save_pretrained(folder, max_shard_size="100KB")
        assert len(list(folder.glob("*.safetensors"))) > 3
    else:
        model.config.save_pretrained(folder)
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("spelling", ["saved", "sharded", "state dict"])
def test_the_same_greedy_tokens_as_generate(
    reference: Any,
    answers: list[tuple[list[int], list[int]]],
    spelling: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.02")
    _save(reference, tmp_path, spelling)
    prompts = [prompt for prompt, _ in answers]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    with LLM(str(tmp_path), block_size=32, skip_tokenizer_init=True, use_tqdm_on_load=False) as llm:
        for expected_hits in ([0, 0, 0, 0, 0], [0, 32, 96, 96, 192]):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [list(o.outputs[0].token_ids) for o in outputs] == [want for _, want in answers]
            assert [output.num_cached_tokens for output in outputs] == expected_hits


@pytest.mark.parametrize("own_head", [False, True])
def test_a_tied_head_that_is_stored_too(
    own_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers unties matrices whose values differ, whatever config.json says."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.02")
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    torch.manual_seed(5)
    model = LlamaForCausalLM(config)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if own_head:
        tensors["lm_head.weight"] = torch.randn(96, 32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(tmp_path)
    reference = LlamaForCausalLM.from_pretrained(tmp_path)
    prompt = random_tokens(40, seed=3)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        logits = reference(ids).logits[0, -1]
    expected = int(logits.argmax())
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, detokenize=False)
    with LLM(str(tmp_path), block_size=32, skip_tokenizer_init=True, use_tqdm_on_load=False) as llm:
        (output,) = llm.generate(prompt, params, use_tqdm=False)
    (logprobs,) = output.outputs[0].logprobs
    assert list(logprobs) == [expected]
    assert logprobs[expected].logprob == pytest.approx(
        float(logits.log_softmax(-1)[expected]), abs=1e-4
    )
