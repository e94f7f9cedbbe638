"""DeepSeek-V4's spelling of tools, calls and results.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="find">
    <｜DSML｜parameter name="text" string="true">as it is</｜DSML｜parameter>
    <｜DSML｜parameter name="limit" string="false">5</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

A parameter is text as it stands (``string="true"``) or JSON. Results stand in the next user turn,
in the order of the calls, as ``<tool_result>...</tool_result>``.
"""

import json
from collections.abc import Sequence

from vllm.tokenizers.chat_messages import ChatMessage
from vllm.tokenizers.chat_tools import ToolSpec
from vllm.tokenizers.tool_calls import Member, MessageCall, read_members

DSML = "｜DSML｜"
BLOCK_OPEN = f"<{DSML}tool_calls>"
BLOCK_CLOSE = f"</{DSML}tool_calls>"
# What separates a block from the text before it; part of the block.
BLOCK_GAP = "\n\n"

# The wording is ours: releases define the section's place and the functions' lines, and models
# follow any clear description of the calls that they were trained to write.
_TOOLS_TEXT = f"""## Tools

You can call the functions listed below. To call some, end your reply with one block like this:

{BLOCK_OPEN}
<{DSML}invoke name="FUNCTION">
<{DSML}parameter name="PARAMETER" string="true|false">VALUE</{DSML}parameter>
</{DSML}invoke>
{BLOCK_CLOSE}

string="true": VALUE is plain text. string="false": VALUE is JSON. Results come in <tool_result>.

Functions:

"""


def tools_section(tools: Sequence[ToolSpec]) -> str:
    """Return what stands behind the system text, one function per line; nothing without tools."""
    if not tools:
        return ""
    lines = "\n".join(json.dumps(tool.function, ensure_ascii=False) for tool in tools)
    return "\n\n" + _TOOLS_TEXT + lines


def calls_block(calls: Sequence[MessageCall]) -> str:
    """Return an assistant's calls, the gap before them included; nothing without calls."""
    if not calls:
        return ""
    return BLOCK_GAP + "\n".join([BLOCK_OPEN, *map(_invoke, calls), BLOCK_CLOSE])


def _invoke(call: MessageCall) -> str:
    members = read_members(call.arguments)
    lines = [f'<{DSML}invoke name="{call.name}">', *map(_parameter, members), f"</{DSML}invoke>"]
    return "\n".join(lines)


def _parameter(member: Member) -> str:
    is_text = isinstance(member.value, str)
    value = member.value if is_text else member.raw
    kind = "true" if is_text else "false"
    return f'<{DSML}parameter name="{member.key}" string="{kind}">{value}</{DSML}parameter>'


def user_turns(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages whose results have become blocks of user turns, in the order of their calls.

    Neighbouring user and tool messages are one turn; its blocks are joined by a blank line.
    """
    turns: list[ChatMessage] = []
    run: list[ChatMessage] = []
    order: dict[str | None, int] = {}
    for message in messages:
        if message.role in ("user", "tool"):
            run.append(message)
            continue
        turns += _merged(run, order)
        run = []
        turns.append(message)
        if message.role == "assistant":
            order = {call.id: i for i, call in enumerate(message.tool_calls)}
    return turns + _merged(run, order)


def _merged(run: Sequence[ChatMessage], order: dict[str | None, int]) -> list[ChatMessage]:
    if not run:
        return []
    results = [message for message in run if message.role == "tool"]
    # Results keep the places that results have; which one stands where is the calls' order.
    by_call = iter(sorted(results, key=lambda result: order.get(result.tool_call_id, len(order))))
    blocks = [
        f"<tool_result>{next(by_call).content}</tool_result>"
        if message.role == "tool"
        else message.content
        for message in run
    ]
    return [ChatMessage("user", "\n\n".join(blocks))]
