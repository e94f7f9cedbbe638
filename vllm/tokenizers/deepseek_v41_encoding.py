"""The prompt format of DeepSeek-V4.1: DeepSeek-V4's with a token before system texts.

    <bos><｜System｜>Reasoning Effort: N (...)    system text<｜User｜> text<｜Assistant｜><think>
    <bos><｜System｜>system text<｜User｜> text<｜Assistant｜></think>                       chat

The effort stands in thinking alone, before the first message. A system text in the middle of a chat
counts as a user's turn; results of calls alone do not. ``deepseek_v4_tools`` has the calls' tags.
"""

from typing import ClassVar

from vllm.tokenizers.chat_messages import count_effort
from vllm.tokenizers.deepseek_v4_encoding import DeepseekV4ChatEncoder, PromptFormat
from vllm.tokenizers.deepseek_v4_tools import V41_TAGS

SYSTEM = "<｜System｜>"
# By the words that APIs have for it; nothing asked for is "high".
_LOW, _HIGH, _MOST = 50, 75, 100
_NUMBERS = {
    "minimal": _LOW,
    "low": _LOW,
    "medium": _LOW,
    "high": _HIGH,
    "xhigh": _HIGH,
    "max": _MOST,
}


def _ask_effort(effort: str | None) -> str:
    number = count_effort(effort) or _NUMBERS.get(effort or "", _HIGH)
    return (
        f"Reasoning Effort: {number} (range 1-100, the higher the value, the more thorough the "
        "reasoning)\n\n"
    )


V41_FORMAT = PromptFormat(
    "DeepSeek-V4.1",
    V41_TAGS,
    _ask_effort,
    system=SYSTEM,
    turn_roles=("user", "system"),
    counts_effort=True,
    part_gap="\n\n",
)


class DeepseekV41ChatEncoder(DeepseekV4ChatEncoder):
    """Encodes chats for DeepSeek-V4.1; see ``DeepseekV4ChatEncoder``."""

    format: ClassVar[PromptFormat] = V41_FORMAT
