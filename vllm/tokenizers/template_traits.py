"""What a chat template takes, found out by trying: templates are programs, and say it nowhere.

Small chats are rendered, each text a word of its own. A template *takes* a chat if it renders it
and every text that counts stands in what comes out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.exceptions import UserInputError
from vllm.tokenizers.chat_messages import ChatMessage
from vllm.tokenizers.content_parts import PartRoles
from vllm.tokenizers.tool_calls import MessageCall
from vllm.tokenizers.tool_forms import TOOL_FORMS, ToolForm

Chat = Sequence[ChatMessage]
_ID = "call00000"
_SYSTEM, _SECOND_SYSTEM = ChatMessage("system", "probeone"), ChatMessage("system", "probetwo")
PROBE_USER, _LATER_USER = ChatMessage("user", "probethree"), ChatMessage("user", "probefour")
PROBE_TOOL: Mapping[str, Any] = {"name": "probetool", "description": "d", "parameters": {}}
_SAID, _SAID_TOO = ChatMessage("assistant", "probefive"), ChatMessage("assistant", "probesix")
_CALL = ChatMessage("assistant", "", tool_calls=(MessageCall(_ID, "f", "{}"),))
_RESULT = ChatMessage("tool", "probeseven", tool_call_id=_ID, name="f")
_LATE_SYSTEMS: Sequence[Chat] = (
    (PROBE_USER, _SYSTEM),
    (PROBE_USER, _SYSTEM, _SAID, _LATER_USER),
    (PROBE_USER, _SAID, _SYSTEM, _LATER_USER),
    (PROBE_USER, _SAID, _SYSTEM),
    (PROBE_USER, _SAID, _SYSTEM, _SAID_TOO, _LATER_USER),
    (_SECOND_SYSTEM, PROBE_USER, _SYSTEM, _SAID, _LATER_USER),
)
_NEIGHBOURS: Mapping[str, Chat] = {
    "user": (PROBE_USER, _LATER_USER),
    "assistant": (PROBE_USER, _SAID, _SAID_TOO, _LATER_USER),
}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template takes; the defaults are those of one that takes nothing but turns in order.

    Attributes:
        system: A system text in front of a question.
        several_systems: Two of them.
        late_systems: One behind a turn, wherever that is.
        lone_system: One without a question.
        neighbours: Roles of which two messages may follow each other.
        user_behind_result: A question behind what a call gave.
        user_before_result: A question between a call and what it gave.
        parts: In which form contents go.
        text_arguments: Arguments of calls must be texts, not objects.
        tool_form: How much of what is optional in a tool must be there.
        shows_tools: Whether tools stand in the prompt at all.
    """

    system: bool = False
    several_systems: bool = False
    late_systems: bool = False
    lone_system: bool = False
    neighbours: frozenset[str] = frozenset()
    user_behind_result: bool = False
    user_before_result: bool = False
    parts: PartRoles = field(default_factory=PartRoles)
    text_arguments: bool = False
    tool_form: ToolForm = TOOL_FORMS[0]
    shows_tools: bool = True


def find_traits(render: Callable[[Chat], str], known: TemplateTraits) -> TemplateTraits:
    """Try in which order a template takes messages.

    Args:
        render: Renders a chat; raises UserInputError where the template fails.
        known: In which forms it takes contents, calls and tools.
    """

    def takes(chat: Chat) -> bool:
        try:
            shown = render(chat)
        except UserInputError:
            return False
        # What a call gave is shown by templates that know calls only.
        return all(message.content in shown for message in chat if message.role != "tool")

    return replace(
        known,
        system=takes((_SYSTEM, PROBE_USER)),
        several_systems=takes((_SYSTEM, _SECOND_SYSTEM, PROBE_USER)),
        late_systems=all(map(takes, _LATE_SYSTEMS)),
        lone_system=takes((_SYSTEM,)),
        neighbours=frozenset(role for role, chat in _NEIGHBOURS.items() if takes(chat)),
        user_behind_result=takes((PROBE_USER, _CALL, _RESULT, _LATER_USER))
        or not takes((PROBE_USER, _CALL, _RESULT)),
        user_before_result=_shows_result(render, (PROBE_USER, _CALL, _LATER_USER, _RESULT)),
    )


def _shows_result(render: Callable[[Chat], str], chat: Chat) -> bool:
    try:
        shown = render(chat)
    except UserInputError:
        return False
    return _RESULT.content in shown and _LATER_USER.content in shown


def shows_tools(render: Callable[[Chat], str]) -> bool:
    """Whether a template tells the model of the probe's tool, wherever it does.

    Args:
        render: Renders a chat with that tool; raises UserInputError where the template fails.
    """
    for chat in ((PROBE_USER,), (_SYSTEM, PROBE_USER)):
        try:
            if PROBE_TOOL["name"] in render(chat):
                return True
        except UserInputError:
            continue
    return False


def needs_text_arguments(render_call: Callable[[bool, Chat], str]) -> bool:
    """Whether a template wants the arguments of calls as texts: it fails on objects alone.

    Args:
        render_call: Renders a chat, with the arguments of its calls as texts or not; raises
            UserInputError where the template fails.
    """
    chat = (PROBE_USER, _CALL, _RESULT)

    def takes(as_text: bool) -> bool:
        try:
            render_call(as_text, chat)
        except UserInputError:
            return False
        return True

    return not takes(False) and takes(True)


def find_tool_form(render_tool: Callable[[Mapping[str, Any]], str]) -> ToolForm:
    """Return the least of the forms of tools in which a template takes one that says little.

    Args:
        render_tool: Renders a chat with a function; raises UserInputError where the template fails.
    """
    for form in TOOL_FORMS:
        try:
            for function in _SPARSE_TOOLS:
                render_tool(form(function))
        except UserInputError:
            continue
        return form
    return TOOL_FORMS[0]


_SPARSE_TOOLS: Sequence[Mapping[str, Any]] = (
    {"name": "f"},
    {"name": "f", "description": "d"},
    {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}},
    {"name": "f", "parameters": {}},
)
