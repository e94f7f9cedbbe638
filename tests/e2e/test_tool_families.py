"""Tools and reasoning of the families with chat templates, each on a model that says its script."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.scripted_checkpoint import write_scripted
from tests.e2e.server_process import ServerProcess

_UNIT = 32
CHATML = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first else '' }}<tool_call>"
    '\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
QWEN = {
    "\n": [
        "<think>",
        "\nI must look",
        " this up.\n",
        "</think>",
        "\n\nLet me",
        " see.",
        '\n<tool_call>\n{"name": "look", ',
        '"arguments": ',
        '{"city":"Oslo",  ',
        '"days":3}',
        "}\n</tool_call>\n<tool_call>\n{",
        '"name": "now", "arguments": {}',
        "}\n</tool_call",
        ">",
        "<|im_end|>",
    ]
}
HARMONY_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|start|>assistant"
    "{# <|channel|> #}"
)
# The piece with the analysis is one token: marks may stand only once in a script.
HARMONY = {
    "assistant": [
        "<|channel|>",
        "analysis<|message|>I must look this up.<|end|><|start|>assistant<|channel|>",
        "commentary to=functions.look ",
        "<|constrain|>",
        "json",
        "<|message|>",
        '{"city":"Oslo",  ',
        '"days":3}',
        "<|call|>",
    ]
}
FAMILIES: dict[str, tuple[Any, str]] = {
    "qwen3": (QWEN, CHATML),
    "gpt-oss": (HARMONY, HARMONY_TEMPLATE),
}
LOOK = '{"city":"Oslo",  "days":3}'
CLOSED = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now", "parameters": CLOSED}},
]
NOW: Any = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_an_agents_turns(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_scripted(family, folder, *FAMILIES[family])
    flags = ("--served-model-name", "tiny", "--max-model-len", "1024")
    environment = {"VLLM_ASCEND_REFERENCE": "0"}
    log = tmp_path / "log.txt"
    with (
        ServerProcess(log, *flags, environment=environment, model=str(folder)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
        num_known = 0
        for turn in range(3):
            answer = client.chat.completions.create(
                model="tiny", messages=messages, tools=TOOLS, temperature=0.0
            )
            (choice,) = answer.choices
            message: Any = choice.message
            assert message.reasoning == "I must look this up."
            assert choice.finish_reason == "tool_calls"
            calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
            assert calls == [("look", LOOK), ("now", "{}")][: 2 if family == "qwen3" else 1]
            usage = answer.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            if family == "qwen3":
                assert message.content == "Let me see."
                cached = usage.prompt_tokens_details.cached_tokens
                assert turn == 0 or cached == (num_known - 1) // _UNIT * _UNIT
            num_known = usage.prompt_tokens + usage.completion_tokens
            messages.append(message.model_dump(exclude_none=True))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": f"rain {turn}"}
                for call in message.tool_calls
            ]
        if family == "qwen3":
            # Off its script the model says anything the grammar allows: here that is one text.
            forced = client.chat.completions.create(
                model="tiny", messages=messages, tools=TOOLS, tool_choice=NOW, temperature=0.0
            ).choices[0]
            assert forced.finish_reason == "tool_calls"
            assert forced.message.tool_calls is not None
            (call,) = forced.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})
            # The prompt has closed the reasoning: none may come before the call.
            for effort in ({"enable_thinking": False}, {}):
                required = client.chat.completions.create(
                    model="tiny",
                    messages=messages,
                    tools=TOOLS[1:],
                    tool_choice="required",
                    temperature=0.0,
                    extra_body={"chat_template_kwargs": effort},
                ).choices[0]
                made: Any = required.message
                assert (getattr(made, "reasoning", None) is None) == bool(effort)
                assert made.content is None
                assert [one.function.name for one in made.tool_calls] == ["now"]
