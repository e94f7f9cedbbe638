"""Chats give the token ids of transformers' ``apply_chat_template``, wherever the template is kept.

The templates are our own, with the constructs that families' templates use: parts, macros,
namespaces, loop controls, reasoning of the last turns only, calls as JSON and field by field.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.tokenizers.family_tokenizers import byte_level
from vllm.exceptions import UserInputError
from vllm.tokenizers import ChatOptions, Tokenizer, make_chat_encoder
from vllm.tokenizers.chat_tools import parse_tools

CHATML = """{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
{%- for tool in tools %}{{- tool | tojson }}{{ '\n' }}{% endfor %}{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif
%}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'system' %}{% continue %}{% endif %}
{%- if m.role == 'tool'
%}{{- '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}
{%- continue %}{% endif %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": '
}}{{ c.function.arguments | tojson }}
{{- '}</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n'
}}{% endif %}
{%- endif %}"""
PARTS = """{%- macro shown(content) %}{% if content is string %}{{ content | trim }}{% else %}
{%- for part in content %}{% if part.type == 'text' %}{{ part['text'] | trim }}{% endif
%}{% endfor %}
{%- endif %}{% endmacro %}
{%- for m in messages %}<|im_start|>{{ 'model' if m['role'] == 'assistant' else m['role'] }}
{{ shown(m['content']) }}
{%- for c in m.tool_calls or [] %}<tool_call><function={{ c.function.name }}>
{%- for k, v in c.function.arguments | items %}<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>{% endfor %}</function></tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>model
{% endif %}"""
PLAIN = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content
}} [/INST]
{%- elif m.role == 'assistant' %} {{ m.content }}{% generation %}{% endgeneration %}{{ eos_token }}
{%- elif m.role == 'tool' %}[RESULT]{{ {"content": m.content, "id": m.tool_call_id} | tojson }}
{%- else %}<<SYS>>{{ m.content }}<</SYS>>{% endif %}
{%- if m.tool_calls %}[CALLS]{{ m.tool_calls | map(attribute='function') | list | tojson
}}{% endif %}
{%- endfor %}"""
FAMILIES = {"chatml": (CHATML, False), "parts": (PARTS, True), "plain": (PLAIN, False)}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now", "description": 'Tells "now" & <then>.'}},
]
WORDS = ["hi", " there", "\n", "  ", "é漢", "🏔", "<b>", "{x}", '"', "'", "</i>", "a\n\nb"]


def _text(rng: random.Random, least: int = 1) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(least, 5))) + rng.choice(["", "."])


def _value(rng: random.Random) -> Any:
    return rng.choice([1, -2.5, True, None, "ü", [1, {"a": "b"}], {"k": [None]}, _text(rng)])


def conversation(rng: random.Random, takes_parts: bool) -> list[dict[str, Any]]:
    """A random conversation; calls' arguments are objects."""

    def content(least: int = 1) -> Any:
        if takes_parts and rng.random() < 0.4:
            return [{"type": "text", "text": _text(rng)} for _ in range(rng.randint(1, 3))]
        return _text(rng, least)

    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": content()})
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": content()})
        if rng.random() < 0.4:
            arguments = {rng.choice("abc"): _value(rng) for _ in range(rng.randint(0, 2))}
            call = {"name": rng.choice(["look", "now"]), "arguments": arguments}
            called = [{"id": "call00001", "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": content(0), "tool_calls": called})
            if rng.random() < 0.5:
                messages[-1]["reasoning_content"] = "so " + _text(rng)
            result = {"role": "tool", "content": content(), "tool_call_id": "call00001"}
            messages.append(result)
        if rng.random() < 0.7:
            messages.append({"role": "assistant", "content": "Well, " + _text(rng)})
            if rng.random() < 0.5:
                messages[-1]["reasoning_content"] = "so " + _text(rng)
    return messages


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same as clients send it: arguments are texts."""
    sent = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_token_ids_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    template, takes_parts = FAMILIES[family]
    made = byte_level()
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    oracle = PreTrainedTokenizerFast(tokenizer_object=made.backend, **config)
    oracle.chat_template = template
    (tmp_path / "tokenizer.json").write_text(made.backend.to_str(), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    file = tmp_path / "given.jinja"
    file.write_text(template, "utf-8")
    (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
    encoders = [
        make_chat_encoder({}, tokenizer, str(file)),
        make_chat_encoder({}, tokenizer, template),
        make_chat_encoder({}, Tokenizer.from_folder(tmp_path)),
    ]
    rng = random.Random(family)
    num_continued = 0
    for i in range(200):
        messages = conversation(rng, takes_parts)
        last = messages[-1]
        continues = last["role"] == "assistant" and i % 2 == 0
        num_continued += continues
        kwargs = {"enable_thinking": False} if i % 5 == 0 else {}
        tools = TOOLS if i % 3 == 0 else None
        wanted = oracle.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            return_dict=False,
            **kwargs,
        )
        options = ChatOptions(
            add_generation_prompt=not continues,
            continue_final_message=continues,
            template_kwargs=kwargs,
            tools=parse_tools(tools),
        )
        for encoder in encoders:
            prompt = encoder.encode_chat(as_sent(messages), options)
            assert prompt.token_ids == wanted, (messages, oracle.decode(wanted), prompt.text)
    assert num_continued > 20


def test_what_a_template_refuses_is_the_requests() -> None:
    encoder = make_chat_encoder({}, byte_level(), "{{ raise_exception('only users') }}")
    with pytest.raises(UserInputError, match="only users"):
        encoder.encode_chat([{"role": "user", "content": "x"}], ChatOptions())
