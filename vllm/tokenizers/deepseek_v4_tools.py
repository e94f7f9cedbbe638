"""DeepSeek-V4's spelling of tools, calls and results.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="find">
    <｜DSML｜parameter name="text" string="true">as it is</｜DSML｜parameter>
    <｜DSML｜parameter name="limit" string="false">5</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

A parameter is text as it stands (``string="true"``) or JSON. Results stand in the next user turn,
in the order of the calls, as ``<tool_result>...</tool_result>``. DeepSeek-V4.1 writes other tags,
and the outer one is ``function_calls`` in DeepSeek-V3.2:

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="find">
    <｜DSML｜ parameter name="text" string="true">as it is</｜DSML｜ parameter>
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.tokenizers.chat_messages import ChatMessage, Role
from vllm.tokenizers.chat_tools import ToolSpec
from vllm.tokenizers.tool_calls import Member, MessageCall, read_members

DSML = "｜DSML｜"


@dataclass(frozen=True, slots=True)
class DsmlTags:
    """How a release spells its tags.

    Attributes:
        outer: Name of the tag around all calls.
        gap: What stands before a name.
        results: Name of the tag around results.
    """

    outer: str
    gap: str = ""
    results: str = "tool_result"

    def open(self, name: str) -> str:
        """Return the beginning of a tag, which attributes or a bracket follow."""
        return f"<{DSML}{self.gap}{name}"

    def close(self, name: str) -> str:
        """Return the tag that ends another."""
        return f"</{DSML}{self.gap}{name}>"

    @property
    def block_open(self) -> str:
        """What a block of calls begins with."""
        return f"{self.open(self.outer)}>"

    @property
    def block_close(self) -> str:
        """What it ends with."""
        return self.close(self.outer)


V32_TAGS = DsmlTags("function_calls", results="function_results")
V4_TAGS = DsmlTags("tool_calls")
V41_TAGS = DsmlTags("calls", " ")

# What separates a block from the text before it; part of the block.
BLOCK_GAP = "\n\n"

# The wording is ours: releases define the section's place and the functions' lines, and models
# follow any clear description of the calls that they were trained to write.
_TOOLS_TEXT = """## Tools

You can call the functions listed below. To call some, end your reply with one block like this:

{block}

string="true": VALUE is plain text. string="false": VALUE is JSON. Results come in <{results}>.

Functions:

"""


def tools_section(tools: Sequence[ToolSpec], tags: DsmlTags = V4_TAGS) -> str:
    """Return what stands behind the system text, one function per line; nothing without tools."""
    if not tools:
        return ""
    lines = "\n".join(json.dumps(tool.function, ensure_ascii=False) for tool in tools)
    shown = [
        tags.block_open,
        f'{tags.open("invoke")} name="FUNCTION">',
        f'{tags.open("parameter")} name="PARAMETER" string="true|false">VALUE'
        f"{tags.close('parameter')}",
        tags.close("invoke"),
        tags.block_close,
    ]
    told = _TOOLS_TEXT.replace("{block}", "\n".join(shown)).replace("{results}", tags.results)
    return "\n\n" + told + lines


def calls_block(calls: Sequence[MessageCall], tags: DsmlTags = V4_TAGS) -> str:
    """Return an assistant's calls, the gap before them included; nothing without calls."""
    if not calls:
        return ""
    invokes = [_invoke(call, tags) for call in calls]
    return BLOCK_GAP + "\n".join([tags.block_open, *invokes, tags.block_close])


def _invoke(call: MessageCall, tags: DsmlTags) -> str:
    parameters = [_parameter(member, tags) for member in read_members(call.arguments)]
    head = f'{tags.open("invoke")} name="{call.name}">'
    return "\n".join([head, *parameters, tags.close("invoke")])


def _parameter(member: Member, tags: DsmlTags) -> str:
    is_text = isinstance(member.value, str)
    value = member.value if is_text else member.raw
    kind = "true" if is_text else "false"
    head = f'{tags.open("parameter")} name="{member.key}" string="{kind}">'
    return f"{head}{value}{tags.close('parameter')}"


def user_turns(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages whose results have become blocks of user turns, in the order of their calls.

    Neighbouring user and tool messages are one turn; its blocks are joined by a blank line. One of
    results alone keeps role "tool".
    """
    turns: list[ChatMessage] = []
    run: list[ChatMessage] = []
    calls: ChatMessage | None = None
    for message in messages:
        if message.role in ("user", "tool"):
            run.append(message)
            continue
        turns += _merged(run, calls)
        run = []
        turns.append(message)
        if message.role == "assistant":
            calls = message
    return turns + _merged(run, calls)


def order_results(results: Sequence[ChatMessage], calls: ChatMessage | None) -> list[ChatMessage]:
    """Return results in the order of an assistant's calls; those of no call come last."""
    made = () if calls is None else calls.tool_calls
    order = {call.id: i for i, call in enumerate(made)}
    return sorted(results, key=lambda result: order.get(result.tool_call_id, len(order)))


def _merged(run: Sequence[ChatMessage], calls: ChatMessage | None) -> list[ChatMessage]:
    if not run:
        return []
    results = [message for message in run if message.role == "tool"]
    # Results keep the places that results have; which one stands where is the calls' order.
    by_call = iter(order_results(results, calls))
    blocks = [
        f"<tool_result>{next(by_call).content}</tool_result>"
        if message.role == "tool"
        else message.content
        for message in run
    ]
    role: Role = "tool" if len(results) == len(run) else "user"
    return [ChatMessage(role, "\n\n".join(blocks))]
