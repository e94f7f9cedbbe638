import pytest
import tokenizers
from tokenizers import models

from vllm.exceptions import ConfigError, UserInputError
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.tokenizers import ChatOptions, Tokenizer, make_chat_encoder
from vllm.tokenizers.deepseek_v4_encoding import DeepseekV4ChatEncoder

HI = [{"role": "user", "content": "Hi"}]


def plain(**config) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer(models.BPE()), config)


def test_deepseek_v4_has_its_own_encoding():
    path = resolve_checkpoint("deepseek-v4").path
    encoder = make_chat_encoder(read_hf_config(path), Tokenizer.from_folder(path))
    assert isinstance(encoder, DeepseekV4ChatEncoder)


def test_a_given_template_wins(tmp_path):
    path = resolve_checkpoint("deepseek-v4").path
    file = tmp_path / "t.jinja"
    file.write_text("mine")
    encoder = make_chat_encoder(read_hf_config(path), Tokenizer.from_folder(path), str(file))
    assert encoder.encode_chat(HI, ChatOptions()).text == "mine"


def test_the_checkpoints_template():
    encoder = make_chat_encoder({"model_type": "gemma3"}, plain(chat_template="own"))
    assert encoder.encode_chat(HI, ChatOptions()).text == "own"


def test_no_template_refuses_chats_only():
    encoder = make_chat_encoder({}, plain())
    with pytest.raises(UserInputError, match="--chat-template"):
        encoder.encode_chat(HI, ChatOptions())


def test_deepseek_v4_with_a_foreign_tokenizer():
    with pytest.raises(ConfigError, match="no token"):
        make_chat_encoder({"model_type": "deepseek_v4"}, plain())
