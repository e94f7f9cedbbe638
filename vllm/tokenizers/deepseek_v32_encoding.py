"""The prompt format of DeepSeek-V3.2, which its release defines in code and not as a template.

As DeepSeek-V4's, but for what follows calls. Their results are no turn: they stand behind the end
of the calls, one element each in the order of the calls, and the next answer behind them.

    <｜User｜> text <｜Assistant｜><think> reasoning </think> calls <eos>

    <function_results>
    <result> ... </result>
    <result> ... </result>
    </function_results>

    <think> reasoning </think> answer <eos>

The reasoning of turns before the last user message is dropped, in chats with tools too. The model
thinks where a request asks for it. V3.2-Exp has another format, whose template lies beside it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from vllm.tokenizers.chat_messages import ChatMessage
from vllm.tokenizers.chat_tools import ToolSpec
from vllm.tokenizers.deepseek_v4_encoding import (
    ASSISTANT,
    BOS,
    EOS,
    THINK_END,
    THINK_START,
    USER,
    DeepseekV4ChatEncoder,
    PromptFormat,
    add_tools,
)
from vllm.tokenizers.deepseek_v4_tools import (
    BLOCK_GAP,
    V32_TAGS,
    calls_block,
    order_results,
    tools_section,
)

V32_FORMAT = PromptFormat("DeepSeek-V3.2", V32_TAGS, lambda effort: "", thinks=False)


def render(
    messages: Sequence[ChatMessage],
    *,
    thinking: bool,
    tools: Sequence[ToolSpec] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Return the prompt text of checked messages; see ``deepseek_v4_encoding.render``."""
    turns = list(_join_results(add_tools(messages, tools_section(tools, V32_TAGS))))
    last_user = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=-1)
    pieces = [BOS]
    for i, turn in enumerate(turns):
        if turn.role == "system":
            pieces.append(turn.content)
        elif turn.role == "user":
            pieces.append(USER + turn.content)
        elif turn.role == "tool":
            pieces.append(BLOCK_GAP + turn.content)
        else:
            is_open = continue_final_message and i == len(turns) - 1
            thinks = thinking and i > last_user
            pieces += [_opener(turns[:i], thinks), _answer(turn, thinks, is_open)]
    if add_generation_prompt:
        pieces.append(_opener(turns, thinking))
    return "".join(pieces)


def _opener(turns: Sequence[ChatMessage], thinks: bool) -> str:
    """What opens an answer behind turns."""
    follows_results = bool(turns) and turns[-1].role == "tool"
    return (BLOCK_GAP if follows_results else ASSISTANT) + (THINK_START if thinks else THINK_END)


def _answer(turn: ChatMessage, thinks: bool, is_open: bool) -> str:
    if thinks and is_open and not turn.content:
        return turn.reasoning  # which is to be continued
    reasoning = turn.reasoning + THINK_END if thinks else ""
    return reasoning + turn.content + calls_block(turn.tool_calls, V32_TAGS) + EOS * (not is_open)


def _join_results(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yields the messages, neighbouring results as one."""
    calls: ChatMessage | None = None
    results: list[ChatMessage] = []
    for message in [*messages, None]:
        if message is not None and message.role == "tool":
            results.append(message)
            continue
        if results:
            listed = "\n".join(
                f"<result>{own.content}</result>" for own in order_results(results, calls)
            )
            name = V32_TAGS.results
            yield replace(results[0], content=f"<{name}>\n{listed}\n</{name}>")
            results = []
        if message is not None:
            calls = message if message.role == "assistant" else calls
            yield message


class DeepseekV32ChatEncoder(DeepseekV4ChatEncoder):
    """Encodes chats for DeepSeek-V3.2; see ``DeepseekV4ChatEncoder``."""

    format: ClassVar[PromptFormat] = V32_FORMAT
    yields_to_template: ClassVar[bool] = True

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        thinking: bool,
        tools: Sequence[ToolSpec],
        effort: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """Return the prompt text of checked messages; more thought cannot be asked for."""
        del effort
        return render(
            messages,
            thinking=thinking,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
