"""sentence-transformers itself on the same folders; skipped by name where it is not installed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.entrypoints.pooling.test_checkpoints import (
    append_end,
    start,
    strip_body,
    write_embedding_gemma,
    write_embedding_gemma2,
    write_modules,
    write_settings,
)
from tests.model_executor.models.decoder.checkpoints import VOCAB_SIZE, write_model
from tests.model_executor.models.decoder.reference import mistral, qwen3
from tests.tokenizers.family_tokenizers import byte_level

sentence_transformers = pytest.importorskip("sentence_transformers")

__all__ = ["start"]  # a fixture

TEXTS = ["x", "The river is high today.", "Which train goes to Bergen, and when?" * 7]
QUERY = "Instruct: find it\nQuery: "


def _last_token(make: Callable[..., dict[str, Any]], folder: Path) -> None:
    model = write_model(make(vocab_size=VOCAB_SIZE), folder, byte_level())
    strip_body(folder, type(model.model).__name__)
    append_end(folder)
    pooling = {"embedding_dimension": model.config.hidden_size, "pooling_mode": "lasttoken"}
    write_modules(folder, [("Pooling", pooling), ("Normalize", {})])


def _means_through_a_layer(folder: Path) -> None:
    model = write_model(qwen3(vocab_size=VOCAB_SIZE), folder, byte_level())
    strip_body(folder, type(model.model).__name__)
    size = model.config.hidden_size
    dense = {
        "in_features": size,
        "out_features": 24,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    pooling = {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True}
    write_modules(folder, [("Pooling", pooling), ("Dense", dense), ("Normalize", {})])
    layer = torch.nn.Linear(size, 24)
    tensors = {"linear.weight": layer.weight.data, "linear.bias": layer.bias.data}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")


FOLDERS: dict[str, Callable[[Path], Any]] = {
    "qwen3": lambda folder: _last_token(qwen3, folder),
    "mistral": lambda folder: _last_token(mistral, folder),
    "mean and dense": _means_through_a_layer,
    "embedding gemma": write_embedding_gemma,
    "embedding gemma 2": lambda folder: write_embedding_gemma2(folder, has_wrapper=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_vectors_are_its_own(name: str, start: Any, tmp_path: Path) -> None:
    FOLDERS[name](tmp_path)
    write_settings(tmp_path, prompts={"query": QUERY})
    # By the names that every version of the package takes.
    listed = tmp_path / "modules.json"
    named = listed.read_text().replace("base.modules.transformer.", "models.")
    listed.write_text(named.replace("base.modules.x.", "models."))
    # It pads even a text that is alone; families' own classes would change the tokenizer.
    told = tmp_path / "tokenizer_config.json"
    config = json.loads(told.read_text())
    more = {"pad_token": config["eos_token"], "tokenizer_class": "PreTrainedTokenizerFast"}
    told.write_text(json.dumps({**config, **more}))
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    for prompt in (None, "query"):
        expected = torch.tensor(theirs.encode(TEXTS, prompt_name=prompt, batch_size=1))
        outputs = start(tmp_path, max_model_len=None).embed(
            TEXTS, use_tqdm=False, prompt_name=prompt
        )
        found = torch.tensor([output.outputs.embedding for output in outputs])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
