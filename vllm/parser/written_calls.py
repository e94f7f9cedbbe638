"""How families write calls, for prompts whose chat template does not: one writer a parser.

What a writer writes its parser reads back. Families whose marks are tokens of their vocabulary
have none here: a template that lacks them belongs to another model. But for DeepSeek V3's and
V3.1's, whose templates write calls and leave it to others to tell of tools.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vllm.tokenizers.deepseek_v4_tools import V4_TAGS, V32_TAGS, V41_TAGS, DsmlTags, calls_block
from vllm.tokenizers.described_tools import WriteCalls
from vllm.tokenizers.tool_calls import MessageCall


def _hermes(calls: Sequence[MessageCall]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {_json(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
        for call in calls
    )


def _llama(calls: Sequence[MessageCall]) -> str:
    return "; ".join(
        f'{{"name": {_json(call.name)}, "parameters": {call.arguments}}}' for call in calls
    )


def _pythonic(calls: Sequence[MessageCall]) -> str:
    written = []
    for call in calls:
        arguments = ", ".join(f"{name}={value!r}" for name, value in _fields(call).items())
        written.append(f"{call.name}({arguments})")
    return f"[{', '.join(written)}]"


def _qwen3_coder(calls: Sequence[MessageCall]) -> str:
    return "\n".join(
        "\n".join(
            [
                "<tool_call>",
                f"<function={call.name}>",
                *(
                    f"<parameter={name}>\n{_bare(value)}\n</parameter>"
                    for name, value in _fields(call).items()
                ),
                "</function>",
                "</tool_call>",
            ]
        )
        for call in calls
    )


def _glm(calls: Sequence[MessageCall]) -> str:
    return "\n".join(
        f"<tool_call>{call.name}\n"
        + "".join(
            f"<arg_key>{name}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n"
            for name, value in _fields(call).items()
        )
        + "</tool_call>"
        for call in calls
    )


def _deepseek(tags: DsmlTags, calls: Sequence[MessageCall]) -> str:
    return calls_block(calls, tags).strip()


def _deepseek_v3(calls: Sequence[MessageCall]) -> str:
    return _section(
        "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n"
            f"```json\n{call.arguments}\n```<｜tool▁call▁end｜>"
            for call in calls
        )
    )


def _deepseek_v31(calls: Sequence[MessageCall]) -> str:
    return _section(
        "".join(
            f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{call.arguments}<｜tool▁call▁end｜>"
            for call in calls
        )
    )


def _section(written: str) -> str:
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def _fields(call: MessageCall) -> dict[str, Any]:
    """A call's arguments; of what a limit cut off none."""
    try:
        value = json.loads(call.arguments or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


CALL_WRITERS: Mapping[str, WriteCalls] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "deepseek_v32": partial(_deepseek, V32_TAGS),
    "deepseek_v4": partial(_deepseek, V4_TAGS),
    "deepseek_v41": partial(_deepseek, V41_TAGS),
    "glm": _glm,
    "hermes": _hermes,
    "llama3_json": _llama,
    "pythonic": _pythonic,
    "qwen3": _hermes,
    "qwen3_coder": _qwen3_coder,
}
