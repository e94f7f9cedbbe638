"""The forms a prompt may have."""

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; ``prompt`` may carry the text they came from, for the output.

    ``cache_boundaries`` are offsets, in tokens, behind which other prompts may go on otherwise:
    where a system prompt, tools or a message end.
    """

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    cache_boundaries: NotRequired[list[int]]


PromptType = str | list[int] | TextPrompt | TokensPrompt
