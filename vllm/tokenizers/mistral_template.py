"""Chats of Mistral's checkpoints that carry no template: the format that their special tokens show.

Mistral's own repositories keep the format in a package of theirs (mistral-common), which renders as
these templates do (texts compared for versions 3, 7, 11 and 13):

     3  the system's text and the tools stand before the last question; calls are listed objects
     7  the system's text has its own tokens; results carry the call's id
    11  each call has a mark of its own: name, id, arguments
    13  tools stand before the first question; calls have no id

Up to version 11 tools, and in 3 the system's text, move with each question: of a conversation with
tools, the prefix cache then finds what stands before its last question but one.
"""

from string import Template

from vllm.tokenizers.tokenizer import Tokenizer

_BASE, _SYSTEM, _NAMED, _REASONING = 3, 7, 11, 13
# The token that a version brings.
_TOKENS = (
    ("[THINK]", _REASONING),
    ("[ARGS]", _NAMED),
    ("[SYSTEM_PROMPT]", _SYSTEM),
    ("[TOOL_CALLS]", _BASE),
)
_FORMAT = """{%- set ns = namespace(first=-1, last=-1, system='') %}
{%- for m in messages %}
{%- if m.role == 'user' and (loop.first or loop.previtem.role != 'user') %}
{%- set ns.last = loop.index0 %}
{%- if ns.first < 0 %}{% set ns.first = loop.index0 %}{% endif %}
{%- elif m.role == 'system' %}{% set ns.system = ns.system + m.content + '\\n\\n' %}{% endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}$system
{%- elif m.role == 'user' %}
{%- if loop.first or loop.previtem.role != 'user' %}
{%- if tools and loop.index0 == ns.$place %}
{{- '[AVAILABLE_TOOLS][' }}
{%- for tool in tools %}
{{- {"type": "function", "function": {"name": tool.function.name,
    "description": tool.function.description or "",
    "parameters": tool.function.parameters or {}}} | tojson }}
{{- '' if loop.last else ', ' }}
{%- endfor %}
{{- '][/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST]' }}$before
{%- else %}{{ '\\n\\n' }}{% endif %}
{{- m.content }}
{%- if loop.last or loop.nextitem.role != 'user' %}{{ '[/INST]' }}{% endif %}
{%- elif m.role == 'tool' %}$result
{%- elif m.role == 'assistant' %}$thought
{{- m.content }}
{%- if m.tool_calls %}$calls{% endif %}
{{- eos_token }}
{%- else %}
{{- raise_exception("messages have the roles system, user, assistant and tool") }}
{%- endif %}
{%- endfor %}"""
_OWN_SYSTEM = "{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
_SYSTEM_IN_QUESTION = "{{ ns.system if loop.index0 == ns.last else '' }}"
_JSON_RESULT = """{{ '[TOOL_RESULTS]{"content": ' }}{{ m.content | as_json }}
{{- ', "call_id": ' }}{{ m.tool_call_id | tojson }}{{ '}[/TOOL_RESULTS]' }}"""
_RESULT_WITH_ID = """{{ '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' }}
{{- m.content + '[/TOOL_RESULTS]' }}"""
_RESULT = "{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
_LISTED_CALLS = """
{{- '[TOOL_CALLS][' }}
{%- for c in m.tool_calls %}
{{- '{"name": ' }}{{ c.function.name | tojson }}{{ ', "arguments": ' }}
{{- c.function.arguments | tojson }}{{ ', "id": ' }}{{ c.id | tojson }}
{{- '}' if loop.last else '}, ' }}
{%- endfor %}
{{- ']' }}"""
_NAMED_CALLS = """
{%- for c in m.tool_calls %}
{{- '[TOOL_CALLS]' + c.function.name }}$call_id{{ '[ARGS]' }}{{ c.function.arguments | tojson }}
{%- endfor %}"""
_CALL_ID = "{{ '[CALL_ID]' + c.id }}"
_THOUGHT = """
{%- if m.reasoning_content %}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}"""


def find_mistral_template(tokenizer: Tokenizer) -> str | None:
    """Return the template of chats in the format that a vocabulary has the tokens of; None: none.

    Args:
        tokenizer: The checkpoint's.
    """
    if any(tokenizer.token_to_id(token) is None for token in ("[INST]", "[/INST]")):
        return None
    for token, version in _TOKENS:
        if tokenizer.token_to_id(token) is not None:
            return make_mistral_template(version)
    return None


def make_mistral_template(version: int) -> str:
    """Return the template of a version of Mistral's format: 3, 7, 11 or 13."""
    result, calls = _JSON_RESULT, _LISTED_CALLS
    if version >= _SYSTEM:
        result = _RESULT_WITH_ID
    if version >= _NAMED:
        calls = _NAMED_CALLS.replace("$call_id", _CALL_ID)
    if version >= _REASONING:
        result, calls = _RESULT, _NAMED_CALLS.replace("$call_id", "")
    return Template(_FORMAT).substitute(
        system=_OWN_SYSTEM if version >= _SYSTEM else "",
        place="first" if version >= _REASONING else "last",
        before="" if version >= _SYSTEM else _SYSTEM_IN_QUESTION,
        result=result,
        thought=_THOUGHT if version >= _REASONING else "",
        calls=calls,
    )
