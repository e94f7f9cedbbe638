"""Templates that write the parts of a message, and those that want one text."""

import pytest

from tests.tokenizers.family_tokenizers import CHATML, byte_level
from vllm.tokenizers import ChatOptions
from vllm.tokenizers.chat_template import JinjaChatEncoder
from vllm.tokenizers.literal_text import LiteralText

# As Gemma 3, Qwen 3.5 and Mistral write them, each in its own way.
ITERATES = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}({{ part.text | trim }})"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro shown(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for item in content %}{{ item['text'] }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ shown(m['content']) }}{% endfor %}"
)
USER_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' and m.content is not string %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% else %}{{ m.content + '' }}{% endif %}{% endfor %}"
)


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (ITERATES, "[system](x)(y)[user](a)(b)"),
        (MACRO, "[system]xy[user]ab"),
        (USER_ONLY, "[system]x\ny[user]ab"),
        (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
            "[system]x\ny[user]a\nb",
        ),
        (
            "{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}{% endfor %}",
            '[system]"x\\ny"[user]"a\\nb"',
        ),
        (
            "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
            "{% endif %}{% endfor %}",
            "[system]x\ny[user]a\nb",
        ),
    ],
)
def test_parts_go_to_templates_that_write_them(template, shown):
    encoder = JinjaChatEncoder(byte_level(), template)
    messages = [
        {"role": "system", "content": parts("x", "y")},
        {"role": "user", "content": parts("a", "b")},
    ]
    assert encoder.encode_chat(messages, ChatOptions()).text == shown
    # One text stays one.
    text = encoder.encode_chat([{"role": "user", "content": "a"}], ChatOptions()).text
    assert "a" in text
    assert "(a)" not in text


def test_special_tokens_in_parts_stay_text():
    tokenizer = byte_level()
    encoder = JinjaChatEncoder(tokenizer, MACRO, LiteralText(tokenizer))
    messages = [{"role": "user", "content": parts("a", "<|im_end|>")}]
    prompt = encoder.encode_chat(messages, ChatOptions())
    assert prompt.text == "[user]a<|im_end|>"
    assert tokenizer.token_to_id("<|im_end|>") not in prompt.token_ids


def test_the_last_part_is_continued():
    encoder = JinjaChatEncoder(byte_level(), MACRO + "END")
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": parts("one ", "two")},
    ]
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert encoder.encode_chat(messages, options).text == "[user]q[assistant]one two"


def test_a_call_that_was_cut_off_is_rendered_as_it_was():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"p": "/et'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    whole = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    encoder = JinjaChatEncoder(byte_level(), whole)
    assert encoder.encode_chat(messages, ChatOptions()).text == '{"p": "/et'
    each = (
        "{% for c in messages[0].tool_calls %}{% for k, v in c.function.arguments | items %}"
        "{{ k }}={{ v }};{% endfor %}{% endfor %}"
    )
    encoder = JinjaChatEncoder(byte_level(), each)
    assert encoder.encode_chat(messages, ChatOptions()).text == 'arguments={"p": "/et;'


def test_a_closed_thought_is_told():
    closed = CHATML + "<think>\n\n</think>\n\n"
    prompt = JinjaChatEncoder(byte_level(), closed).encode_chat(
        [{"role": "user", "content": "a"}], ChatOptions()
    )
    assert (prompt.in_reasoning, prompt.has_reasoned) == (False, True)
