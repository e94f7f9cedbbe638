"""``vllm serve`` on a checkpoint folder of a family, asked by OpenAI's client.

Every family's answers and hits: ``tests/entrypoints/test_llm_families.py``; a server adds the
folder's tokenizer and template to that, of which here is one of each kind.
"""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.server_process import ServerProcess
from tests.model_executor.models.decoder.checkpoints import (
    VOCAB_SIZE,
    generate_greedily,
    write_checkpoint,
)
from tests.model_executor.models.hf_reference import random_tokens
from vllm.tokenizers import Tokenizer

CPU = {"VLLM_ASCEND_REFERENCE": "0"}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3.5"])
def test_a_family_is_served(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    reference = write_checkpoint(family, folder)
    tokenizer = Tokenizer.from_folder(folder)
    prompt = random_tokens(100, 5, VOCAB_SIZE)
    expected = tokenizer.decode(generate_greedily(reference, prompt, 8), skip_special_tokens=True)
    flags = ("--served-model-name", "tiny", "--max-model-len", "1024")
    log = tmp_path / "log.txt"
    with (
        ServerProcess(log, *flags, environment=CPU, model=str(folder)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        for hit in (0, 96):
            answer = client.completions.create(model="tiny", prompt=prompt, **GREEDY)
            assert answer.choices[0].text == expected
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == hit
        special = max(tokenizer.special_texts, key=len)
        chats = [
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": content}], **GREEDY
            ).usage
            for content in (f"a {special}", "a ")
        ]
        assert chats[0] is not None
        assert chats[1] is not None
        # Typed into a message a special token is text, hence several tokens.
        assert chats[0].prompt_tokens > chats[1].prompt_tokens + 1
