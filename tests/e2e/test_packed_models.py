"""A GGUF file and an AWQ folder, served: the answers of their decoded twins."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.server_process import ServerProcess
from tests.model_executor.model_loader.gguf_files import Type, write_gguf
from tests.model_executor.model_loader.packed_formats import FORMATS, write_quantised
from tests.model_executor.models.decoder.reference import build_hf_model, qwen3
from tests.model_executor.models.hf_reference import random_tokens
from tests.tokenizers.family_tokenizers import byte_level
from vllm import LLM, SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CPU = {"VLLM_ASCEND_REFERENCE": "0"}
PROMPT = random_tokens(100, 5, 256)
CHAT: Any = [{"role": "user", "content": "in time"}]
RAW = qwen3(vocab_size=byte_level().vocab_size, hidden_size=256, intermediate_size=256, head_dim=64)


def write_tokenizer_files(folder: Path) -> None:
    tokenizer = byte_level()
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
    config = {**tokenizer.template_tokens, "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def ask(model: Path, log: Path) -> tuple[Any, Any, int]:
    """Returns a greedy answer, a chat's, and how long a second asking's hit was."""
    flags = ("--served-model-name", "tiny", "--max-model-len", "1024")
    with ServerProcess(log, *flags, model=str(model), environment=CPU) as server:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        first, second = (
            server.post("/v1/completions", {**body, "ignore_eos": True}).json() for _ in range(2)
        )
        assert first["choices"][0]["text"] == second["choices"][0]["text"]
        chat = server.post(
            "/v1/chat/completions",
            {
                "model": "tiny",
                "messages": CHAT,
                "max_tokens": 8,
                "temperature": 0,
                "ignore_eos": True,
            },
        ).json()
        hit = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        return first["choices"][0]["text"], chat["choices"][0]["message"]["content"], hit


def ask_twin(llm: LLM) -> tuple[Any, Any, int | None]:
    """The same of an engine."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    first, second = (llm.generate([{"prompt_token_ids": PROMPT}], params)[0] for _ in range(2))
    assert first.outputs[0].text == second.outputs[0].text
    (chat,) = llm.chat(CHAT, params)
    return first.outputs[0].text, chat.outputs[0].text, second.num_cached_tokens


@pytest.mark.parametrize("kind", ["gguf", "awq"])
def test_a_packed_model_is_served(
    kind: str, tmp_path: Path, start_twin: Callable[[Path], LLM]
) -> None:
    state = dict(build_hf_model(RAW, seed=7).state_dict())
    state.pop("lm_head.weight", None)
    twin_folder, packed = tmp_path / "twin", tmp_path / "packed"
    twin_folder.mkdir()
    if kind == "gguf":
        packed.mkdir()
        model = packed / "model.gguf"
        types = [Type.Q4_K, Type.Q8_0, Type.Q6_K, Type.Q4_0]
        twin = write_gguf("qwen3", RAW, state, model, types, byte_level())
    else:
        model = packed
        twin = write_quantised(FORMATS["awq"], RAW, state, packed)
        write_tokenizer_files(packed)
    save_file({name: value.contiguous() for name, value in twin.items()},
              twin_folder / "model.safetensors")  # fmt: skip
    (twin_folder / "config.json").write_text(json.dumps(RAW))
    write_tokenizer_files(twin_folder)
    answers = ask(model, tmp_path / "log.txt")
    assert answers == ask_twin(start_twin(twin_folder))
    assert answers[2] == 96
    log = (tmp_path / "log.txt").read_text()
    assert "native kernels: off" not in log
    if kind == "gguf":
        assert "GGUF: Q" in log
    assert torch.isfinite(twin["model.norm.weight"]).all()
