"""Families beside those of ``test_model``: transformers' logits on torch and on the kernels."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_executor.model_loader.gguf_families import write_family, write_recurrent_family
from tests.model_executor.model_loader.test_gguf import load
from tests.model_executor.models.decoder.building import (
    assert_same_weights,
    build_model,
    make_harness,
    wrap_text,
)
from tests.model_executor.models.decoder.checkpoints import assert_greedy
from tests.model_executor.models.decoder.other_families import OTHER_FAMILIES, RECURRENT_FAMILIES
from tests.model_executor.models.decoder.reference import (
    build_hf_model,
    config_as_saved,
    published_tensors,
    run_reference,
)
from tests.model_executor.models.hf_reference import random_tokens
from vllm import LLM, SamplingParams
from vllm.model_executor.models.registry import resolve_model

LENGTHS = (150, 97, 33)


def find_arch(family: str) -> str:
    """Returns the architecture of a family's GGUF files."""
    return family.removesuffix("-softmax").removesuffix("-yarn").removesuffix("-window")


@pytest.mark.parametrize("native", [0, 1], ids=["torch", "native"])
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_logits_are_transformers(family: str, native: int) -> None:
    raw = OTHER_FAMILIES[family]
    reference = build_hf_model(raw, seed=7)
    model = build_model(raw, dict(reference.state_dict()))
    saved: dict[str, Any] = config_as_saved(reference)
    again = {**saved, "architectures": raw["architectures"]}
    assert resolve_model(raw["architectures"]).parse_config(again) == model.config
    sequences = [random_tokens(length, length) for length in LENGTHS]
    runs = [run_reference(reference, token_ids) for token_ids in sequences]
    assert min(run.margins.min() for run in runs) > 1e-5, "a near-tie of a router"
    rng = random.Random(1)
    harness = make_harness(model, 32, packed=True, native=native)
    live = [harness.add(token_ids) for token_ids in sequences]
    while any(sequence.num_left for sequence in live):
        picked = [i for i, s in enumerate(live) if s.num_left]
        counts = [min(rng.choice([1, 2, 9, 70]), live[i].num_left) for i in picked]
        starts = [live[i].num_computed for i in picked]
        work = [(live[i], count) for i, count in zip(picked, counts, strict=True)]
        for i, start, rows in zip(picked, starts, harness.step(work), strict=True):
            wanted = runs[i].logits[start : start + len(rows)].log_softmax(-1)
            torch.testing.assert_close(rows.log_softmax(-1), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_a_gguf_file_is_the_same_model(family: str, tmp_path: Path) -> None:
    raw, path = OTHER_FAMILIES[family], tmp_path / "model.gguf"
    state = dict(build_hf_model(raw, seed=7).state_dict())
    write_family(find_arch(family), raw, state, path)
    found, expected = load(path), build_model(raw, state)
    assert replace(found.config, names=expected.config.names, layers=()) == replace(
        expected.config, norm=found.config.norm, layers=()
    )
    for plan, own in zip(found.config.layers, expected.config.layers, strict=True):
        # Projections by key head are apart in files, and a magnitude is rounded.
        assert plan.rope is not None or plan.recurrence is not None
        rope = plan.rope and replace(plan.rope, magnitude=own.rope.magnitude)
        assert replace(plan, recurrence=None, rope=rope) == replace(own, recurrence=None)
    token_ids = random_tokens(60, 3)
    runs = [make_harness(model).run(token_ids, [60]) for model in (found, expected)]
    if family in ("gemma2", "qwen3next", "phi3"):
        # A norm's weight and one more are rounded together in the file, as logarithms are.
        torch.testing.assert_close(*runs, atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(*runs)


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_an_engine_hits_to_the_unit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    raw, path = OTHER_FAMILIES[family], tmp_path / "model.gguf"
    reference = build_hf_model(raw, seed=7)
    write_family(find_arch(family), raw, dict(reference.state_dict()), path)
    prompt = random_tokens(101, 5)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(
        str(path), skip_tokenizer_init=True, max_model_len=256, kv_cache_memory_bytes=1 << 24
    ) as llm:
        asked = {"prompt_token_ids": prompt}
        first, again = (llm.generate([asked], params, use_tqdm=False)[0] for _ in range(2))
    assert again.num_cached_tokens == 96
    answer = list(first.outputs[0].token_ids)
    assert list(again.outputs[0].token_ids) == answer
    assert_greedy(reference, prompt, answer)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_gguf_file_of_recurrent_layers_is_the_same_model(family: str, tmp_path: Path) -> None:
    raw, path = RECURRENT_FAMILIES[family], tmp_path / "model.gguf"
    model = build_hf_model(raw, seed=7)
    expected = build_model(raw, published_tensors(model))
    tensors = {name: slot.clone() for name, slot in expected.weight_slots().items()}
    write_recurrent_family(family, raw.get("text_config", raw), tensors, path)
    found = load(path)
    assert replace(found.config, names=expected.config.names) == expected.config
    token_ids = random_tokens(60, 3)
    runs = [make_harness(each, 32).run(token_ids, [60]) for each in (found, expected)]
    torch.testing.assert_close(*runs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_wrapper_with_vision_is_its_text(prefix: str) -> None:
    raw = OTHER_FAMILIES["mistral3"]
    state = dict(build_hf_model(raw, seed=7).state_dict())
    name = "Mistral3ForConditionalGeneration"
    wrapper, tensors = wrap_text(raw, state, name, "mistral3", prefix)
    tensors["vision_tower.ln_pre.weight"] = torch.ones(3)
    model = build_model(wrapper, tensors)
    assert model.config.placeholder_ids == (10,)
    assert_same_weights(model, build_model(raw, state))
    old = {k: v for k, v in raw.items() if k != "rope_parameters"}
    old |= {"model_type": "mistral", "rope_theta": 1e4}
    parsed = resolve_model([name]).parse_config({**wrapper, "text_config": old})
    assert not any(layer.window for layer in parsed.layers)


def test_old_files_of_latent_attention_have_one_matrix_by_head(tmp_path: Path) -> None:
    raw, path = OTHER_FAMILIES["deepseek2"], tmp_path / "model.gguf"
    state = dict(build_hf_model(raw, seed=7).state_dict())
    write_family("deepseek2", raw, state, path, has_whole_heads=True)
    found, expected = load(path), build_model(raw, state)
    token_ids = random_tokens(20, 3)
    runs = [make_harness(model).run(token_ids, [20]) for model in (found, expected)]
    assert torch.equal(*runs)
