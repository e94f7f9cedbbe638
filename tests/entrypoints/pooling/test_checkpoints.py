"""Folders as sentence-transformers writes them, against transformers' classes and its pooling."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from tests.model_executor.models.decoder.checkpoints import VOCAB_SIZE, write_model
from tests.model_executor.models.decoder.reference import gemma3, mistral, qwen3
from tests.model_executor.models.hf_reference import random_tokens
from tests.tokenizers.family_tokenizers import byte_level, spaced
from vllm import LLM
from vllm.exceptions import ConfigError, UnsupportedModelError, UserInputError
from vllm.model_executor.model_loader.vector_checkpoints import (
    find_projection,
    read_vector_checkpoint,
)
from vllm.tokenizers import Tokenizer

LENGTHS = (1, 2, 31, 33, 150, 300)
QUERY = "Instruct: find it\nQuery: "
IDENTITY = "torch.nn.modules.linear.Identity"
_TYPES = "sentence_transformers.base.modules."


def write_modules(folder: Path, modules: list[tuple[str, dict[str, Any]]]) -> None:
    """Write modules.json and a folder for each module behind the first."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{_TYPES}transformer.Transformer"}]
    for number, (kind, config) in enumerate(modules, start=1):
        path = f"{number}_{kind}"
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
        entry = {"idx": number, "name": str(number), "path": path, "type": f"{_TYPES}x.{kind}"}
        listed.append(entry)
    (folder / "modules.json").write_text(json.dumps(listed))


def write_settings(folder: Path, **settings: Any) -> None:
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps(settings))


def strip_body(folder: Path, name: str) -> None:
    """Leave the body alone, as it is saved without the model around it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    bare = {k.removeprefix("model."): v for k, v in tensors.items() if k != "lm_head.weight"}
    save_file(bare, file)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [name]
    (folder / "config.json").write_text(json.dumps(config))


def append_end(folder: Path) -> None:
    """Let the tokenizer put an end token behind a text, as Qwen3-Embedding's does."""
    backend = Tokenizer.from_folder(folder).backend
    end = "<|im_end|>"
    pair = [(end, backend.token_to_id(end))]
    backend.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=pair)
    (folder / "tokenizer.json").write_text(backend.to_str())


def unit(vector: torch.Tensor) -> torch.Tensor:
    return vector / vector.norm()


def rows_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        rows: torch.Tensor = model.model(torch.tensor([ids])).last_hidden_state[0]
    return rows


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start engines in this process."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engines: list[LLM] = []

    def make(folder: Path, **settings: Any) -> LLM:
        sizes = {"max_model_len": 512, "kv_cache_memory_bytes": 16 << 20, "block_size": 32}
        engines.append(LLM(folder, use_tqdm_on_load=False, **{**sizes, **settings}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_last_tokens_of_a_body(family: str, start: Any, tmp_path: Path) -> None:
    """As Qwen3-Embedding and e5-mistral are published: no prefix, no head, an end appended."""
    make = qwen3 if family == "qwen3" else mistral
    model = write_model(make(vocab_size=VOCAB_SIZE), tmp_path, byte_level())
    strip_body(tmp_path, type(model.model).__name__)
    append_end(tmp_path)
    write_modules(tmp_path, [("Pooling", {"pooling_mode": "lasttoken"}), ("Normalize", {})])
    write_settings(tmp_path, prompts={"query": QUERY})
    llm = start(tmp_path)
    # Without an output matrix there is nothing to draft; the embedding may be one.
    assert llm.llm_engine.vllm_config.may_draft == (family == "qwen3")
    prompts = [random_tokens(length, length, VOCAB_SIZE) for length in LENGTHS]
    outputs = llm.embed([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
    for ids, output in zip(prompts, outputs, strict=True):
        expected = unit(rows_of(model, ids)[-1])
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), expected, atol=1e-5, rtol=0
        )
        (alone,) = llm.embed({"prompt_token_ids": ids}, use_tqdm=False)
        assert alone.outputs == output.outputs
        assert alone.num_cached_tokens == (len(ids) - 1) // 32 * 32
    (text,) = llm.embed("Bergen", use_tqdm=False, prompt_name="query")
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode(QUERY + "Bergen", add_special_tokens=False)
    ids.append(tokenizer.special_token_id("<|im_end|>"))
    assert text.prompt_token_ids == ids
    with pytest.raises(UserInputError, match="passage"):
        llm.embed("x", prompt_name="passage", use_tqdm=False)


@pytest.mark.slow
def test_means_through_layers_in_chunks(start: Any, tmp_path: Path) -> None:
    """In the older spelling, and with steps that are shorter than the texts."""
    model = write_model(qwen3(vocab_size=VOCAB_SIZE), tmp_path, byte_level())
    size = model.config.hidden_size
    old = {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True}
    dense = {
        "in_features": size,
        "out_features": 24,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    write_modules(tmp_path, [("Pooling", old), ("Dense", dense), ("Normalize", {})])
    layer = torch.nn.Linear(size, 24)
    tensors = {"linear.weight": layer.weight.data, "linear.bias": layer.bias.data.bfloat16()}
    layer.bias.data = tensors["linear.bias"].float()
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    llm = start(tmp_path, max_num_batched_tokens=64, max_num_seqs=8)
    prompts = [random_tokens(length, length, VOCAB_SIZE) for length in LENGTHS]
    outputs = llm.embed([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
    for ids, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            expected = unit(torch.tanh(layer(rows_of(model, ids).mean(0))))
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), expected, atol=1e-5, rtol=0
        )
        (alone,) = llm.embed({"prompt_token_ids": ids}, use_tqdm=False)
        assert alone.outputs == output.outputs
        assert alone.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["Qwen2ForCausalLM"], "is_causal": False}, "is_causal=false"),
        ({"architectures": ["LlamaBidirectionalModel"]}, "LlamaBidirectionalModel"),
        ({"architectures": ["MistralBiModel"]}, "MistralBiModel"),
        ({"architectures": ["LlamaEncoderModel"]}, "LlamaEncoderModel"),
        ({"architectures": ["NVEmbedModel"]}, "NVEmbedModel"),
        ({"architectures": ["Qwen2ForCausalLM"], "auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    ],
)
def test_classes_trained_both_ways_are_refused(
    config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(UnsupportedModelError, match=named):
        read_vector_checkpoint(config, tmp_path)


def test_what_a_config_leaves_out_is_filled_in(tmp_path: Path) -> None:
    causal = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    assert read_vector_checkpoint(causal, tmp_path) == (causal, True)
    body = {"architectures": ["Gemma3TextModel"]}
    assert read_vector_checkpoint(body, tmp_path).config["architectures"] == ["Gemma3ForCausalLM"]
    unknown = {"architectures": ["BertModel"]}
    assert read_vector_checkpoint(unknown, tmp_path).config == unknown
    save_file({"embed_tokens.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    own = read_vector_checkpoint({**causal, "architectures": ["Qwen3Model"]}, tmp_path)
    assert own.config["tie_word_embeddings"] is True
    assert not own.generates
    shutil.rmtree(tmp_path)


def write_embedding_gemma(folder: Path) -> Any:
    """Write a tiny EmbeddingGemma: windows on both sides, a mean, two layers, a norm."""
    raw = gemma3(vocab_size=VOCAB_SIZE, use_bidirectional_attention=True)
    model = write_model(raw, folder, spaced())
    # As the release has it: transformers would halve the window of what it saved once more.
    (folder / "config.json").write_text(json.dumps(raw))
    strip_body(folder, "Gemma3TextModel")
    size = model.config.hidden_size
    sizes = ((size, 40), (40, size))
    layers = [
        {"in_features": one, "out_features": other, "bias": False, "activation_function": IDENTITY}
        for one, other in sizes
    ]
    pooling = {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True}
    write_modules(
        folder,
        [("Pooling", pooling), ("Dense", layers[0]), ("Dense", layers[1]), ("Normalize", {})],
    )
    torch.manual_seed(2)
    model.dense = [torch.randn(other, one) for one, other in sizes]
    for number, weight in enumerate(model.dense, start=2):
        save_file({"linear.weight": weight}, folder / f"{number}_Dense" / "model.safetensors")
    write_settings(folder, prompts={"query": "task: search result | query: "})
    return model


@pytest.mark.slow
def test_tokens_that_see_both_ways(start: Any, tmp_path: Path) -> None:
    model = write_embedding_gemma(tmp_path)
    llm = start(tmp_path)
    prompts = [random_tokens(length, length, VOCAB_SIZE) for length in LENGTHS]
    outputs = llm.embed([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
    for ids, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            mean = rows_of(model, ids).mean(0)
            expected = unit(model.dense[1] @ (model.dense[0] @ mean))
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), expected, atol=1e-5, rtol=0
        )
        (again,) = llm.embed({"prompt_token_ids": ids}, use_tqdm=False)
        assert again.num_cached_tokens == 0
        torch.testing.assert_close(
            torch.tensor(again.outputs.embedding), expected, atol=1e-5, rtol=0
        )
    # A step as long as the longest prompt, or none.
    with pytest.raises(ConfigError, match="max_num_batched_tokens=100"):
        start(tmp_path, max_num_batched_tokens=100)
    for name in ("enable_prefix_caching", "enable_chunked_prefill"):
        with pytest.raises(ConfigError, match=name):
            start(tmp_path, **{name: True})


def test_both_ways_is_known_of_one_family(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "use_bidirectional_attention": True}
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        read_vector_checkpoint(config, tmp_path)


def write_embedding_gemma2(folder: Path, *, has_wrapper: bool) -> Any:
    """Write a tiny EmbeddingGemma 2: as its text part alone, or within its wrapper."""
    # Its class is newer than some versions of the library.
    from transformers.models.embedding_gemma2 import (
        EmbeddingGemma2TextConfig,
        EmbeddingGemma2TextModel,
    )

    config = EmbeddingGemma2TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        sliding_window=24,
        hidden_size_per_layer_input=8,
        embedding_dim=40,
        attn_implementation="eager",
    )
    model = EmbeddingGemma2TextModel(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.5 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            noise = torch.randn(parameter.shape, generator=generator) * size
            parameter.copy_(noise + (parameter.ndim == 1))
        for layer in model.layers:
            layer.layer_scalar.fill_(0.7)
            # Scores are not scaled: as random as the rest they would be of hundreds.
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight *= 0.2
    raw, tensors = config.to_dict(), dict(model.state_dict())
    if has_wrapper:
        raw = {
            "architectures": ["EmbeddingGemma2Model"],
            "model_type": "embedding_gemma2",
            "text_config": raw,
            "vision_config": {"model_type": "gemma4_vision"},
        }
        tensors = {f"language_model.{name}": value for name, value in tensors.items()}
        tensors["vision_tower.x.weight"] = torch.zeros(2, 2)
        for sense in ("embed_audio", "embed_vision"):
            tensors[f"{sense}.embedding_projection.weight"] = torch.zeros(40, 40)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(spaced().backend.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(spaced().template_tokens))
    write_modules(
        folder,
        [("Pooling", {"embedding_dimension": 40, "pooling_mode": "mean"}), ("Normalize", {})],
    )
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 320}')
    return model


@pytest.mark.slow
@pytest.mark.parametrize("has_wrapper", [False, True])
def test_embedding_gemma2(has_wrapper: bool, start: Any, tmp_path: Path) -> None:
    model = write_embedding_gemma2(tmp_path, has_wrapper=has_wrapper)
    llm = start(tmp_path, max_model_len=None)
    prompts = [random_tokens(length, length, VOCAB_SIZE) for length in (*LENGTHS, 24, 25, 26)]
    outputs = llm.embed([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
    for ids, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            rows = model(torch.tensor([ids])).last_hidden_state[0]
        found = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(found, unit(rows.mean(0)), atol=1e-5, rtol=0)
        (again,) = llm.embed({"prompt_token_ids": ids}, use_tqdm=False)
        assert again.num_cached_tokens == 0
    # A step holds the longest text, by the files that say how long it is.
    with pytest.raises(ConfigError, match="max_num_batched_tokens=100"):
        start(tmp_path, max_model_len=None, max_num_batched_tokens=100)


def test_a_folder_without_weights_has_no_projection(tmp_path: Path) -> None:
    """Random weights, ``--load-format dummy``, come from no file."""
    assert find_projection(tmp_path) is None
