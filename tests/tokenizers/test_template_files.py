"""The template that chats take, wherever it is kept."""

import json
from pathlib import Path

import pytest

from tests.tokenizers.family_tokenizers import byte_level
from vllm.exceptions import ConfigError
from vllm.parser.registry import choose_parsers
from vllm.tokenizers import ChatOptions, Tokenizer, make_chat_encoder
from vllm.tokenizers.chat_encoder import find_templates
from vllm.tokenizers.chat_tools import parse_tools

TOOLS = parse_tools([{"type": "function", "function": {"name": "look"}}])
# What tells the format of calls and of reasoning stands in the text alone.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}{# </think> #}"
)
HI = [{"role": "user", "content": "hi"}]


def _folder(path: Path, **config: object) -> Path:
    """A folder with a tokenizer and the config that is given."""
    path.mkdir()
    (path / "tokenizer.json").write_text(byte_level().backend.to_str())
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **config}))
    return path


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "deepseek_v4"])
def test_file_folder_and_text_behave_alike(tmp_path: Path, model_type: str) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_text(TEMPLATE)
    tokenizer = Tokenizer.from_folder(_folder(tmp_path / "model"))
    for given in (str(file), str(tmp_path), TEMPLATE):
        templates = find_templates({"model_type": model_type}, tokenizer, given)
        assert templates is not None
        choice = choose_parsers(model_type, templates.for_tools)
        expected = "qwen3" if model_type == "qwen3" else "hermes"
        assert (choice.tools, choice.reasoning) == (expected, "qwen3")
        encoder = make_chat_encoder({"model_type": model_type}, tokenizer, given)
        assert "<tool_call>" in encoder.encode_chat(HI, ChatOptions(tools=TOOLS)).text


def test_named_templates_of_the_config_and_files_beside_it(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with <tool_call>"},
        {"name": "rag", "template": "documents"},
    ]
    folder = _folder(tmp_path / "model", chat_template=named)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.chat_template == "plain"
    templates = find_templates({}, tokenizer)
    assert templates is not None
    assert choose_parsers("llama", templates.for_tools).tools == "hermes"
    encoder = make_chat_encoder({}, tokenizer)
    assert encoder.encode_chat(HI, ChatOptions()).text == "plain"
    assert encoder.encode_chat(HI, ChatOptions(tools=TOOLS)).text == "with <tool_call>"
    # Files stand for all of the config's.
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "file"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("file tools")
    encoder = make_chat_encoder({}, Tokenizer.from_folder(folder))
    assert encoder.encode_chat(HI, ChatOptions(tools=TOOLS)).text == "file tools"


@pytest.mark.parametrize("given", [3, [{"name": "rag", "template": "x"}], [{"name": "default"}]])
def test_templates_of_no_known_form(tmp_path: Path, given: object) -> None:
    tokenizer = Tokenizer.from_folder(_folder(tmp_path / "model", chat_template=given))
    with pytest.raises(ConfigError, match="one called 'default'"):
        find_templates({}, tokenizer)
    assert find_templates({"model_type": "deepseek_v4"}, tokenizer) is None


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jinja.*Give a file, a folder"):
        find_templates({}, byte_level(), str(tmp_path / "none.jinja"))
