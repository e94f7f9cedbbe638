import subprocess
import sys

import pytest

from tests.parser.reading import read
from vllm.exceptions import ConfigError
from vllm.parser.interface import new_call_id
from vllm.parser.registry import ParserChoice, check_parser_names, choose_parsers

QWEN = "{% if tools %}<tool_call>{% endif %}<think></think>"
LLAMA = '{% if tools %}{"name": x, "parameters": y}{% endif %}'
LLAMA_CALL = """{% if tools %}{{- '{"name": "' + call.name + '", ' }}
{{- '"parameters": ' }}{{- call.arguments | tojson }}{% endif %}"""
# Which list tools alike, and have calls of their own.
COMMAND_A = """{% for t in tools %}{"name": "{{ t.name }}", "parameters": {{ t.parameters }}}
{% endfor %}<|START_ACTION|>{"tool_name": "{{ call.name }}", "parameters": {{ call.arguments }}}"""
ATEM = """{% for tool in tools %}{"name": ' + name + ', "description": ' + said + ', "parameters": '
+ tool.parameters + '}'{% endfor %}<atem:invoke name="' + call.name + '">{{ call.arguments }}"""
HARMONY = "<|start|>assistant<|channel|>final"


@pytest.mark.parametrize(
    ("model_type", "template", "reasoning", "tools"),
    [
        ("deepseek_v4", None, "deepseek_v4", "deepseek_v4"),
        ("qwen3", QWEN, "qwen3", "qwen3"),
        ("qwen3_moe", "<tool_call>", "none", "qwen3"),
        ("llama", QWEN, "qwen3", "hermes"),
        ("llama", LLAMA, "none", "llama3_json"),
        ("llama", LLAMA_CALL, "none", "llama3_json"),
        ("deepseek_v4", LLAMA, "none", "llama3_json"),
        ("deepseek_v4", "[TOOL_CALLS]", "none", "mistral"),
        ("deepseek_v4", "<|im_start|>", "deepseek_v4", "deepseek_v4"),
        ("cohere2", COMMAND_A, "none", "none"),
        ("other", ATEM, "none", "none"),
        ("gpt_oss", HARMONY, "openai_gptoss", "openai"),
        ("gemma3_text", "<start_of_turn>", "none", "none"),
        ("llama", None, "none", "none"),
    ],
)
def test_the_model_decides(model_type, template, reasoning, tools):
    choice = choose_parsers(model_type, template)
    assert choice == ParserChoice(reasoning, tools)
    assert choice.is_harmony == (tools == "openai")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("hermes", None), ParserChoice("deepseek_v4", "hermes")),
        (("none", "none"), ParserChoice("none", "none")),
        (("", ""), ParserChoice("deepseek_v4", "deepseek_v4")),
        (("hermes", "qwen3"), ParserChoice("qwen3", "hermes")),
        (("openai", None), ParserChoice("openai_gptoss", "openai")),
        ((None, "openai_gptoss"), ParserChoice("openai_gptoss", "openai")),
        (("openai", "none"), ParserChoice("none", "openai")),
    ],
)
def test_flags_go_before_the_model(flags, expected):
    assert choose_parsers("deepseek_v4", None, *flags) == expected


@pytest.mark.parametrize("flags", [("openai", "qwen3"), ("hermes", "openai_gptoss")])
def test_formats_that_exclude_each_other(flags):
    with pytest.raises(ConfigError, match="cannot be mixed"):
        choose_parsers("llama", None, *flags)


@pytest.mark.parametrize("flags", [("hermes2", None), (None, "deepseek_v5")])
def test_unknown_names(flags):
    with pytest.raises(ConfigError, match="is unknown: use one of"):
        check_parser_names(*flags)


def test_a_server_loads_its_own_parser_alone() -> None:
    code = (
        "import sys; from vllm.parser.registry import choose_parsers;"
        f"choose_parsers('gpt_oss', {HARMONY!r});"
        "print(*sorted(set('gemma harmony llama marked_sections mistral pythonic'.split())"
        " & {m.removeprefix('vllm.parser.') for m in sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert out.stdout.split() == ["harmony"]


@pytest.mark.parametrize("tools", ["mistral", "mistral_v11"])
def test_ids_are_made_as_the_caller_asks(tools: str) -> None:
    """Without such a wish Mistral's calls have ids of nine letters, as its template demands."""
    text = '[TOOL_CALLS][{"name": "find", "arguments": {"text": "x"}}]'
    if tools == "mistral_v11":
        text = '[TOOL_CALLS]find[ARGS]{"text": "x"}'
    choice = ParserChoice("none", tools)
    (call,) = read(choice, text).tool_calls
    assert call.id == "call_0"
    (call,) = read(choice, text, new_call_id=new_call_id).tool_calls
    assert len(call.id) == 9
