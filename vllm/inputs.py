"""The forms a prompt may have."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from vllm.multimodal.inputs import ImageFeature

# Offsets of a prompt that a client may mark as worth a checkpoint.
MAX_CACHE_BOUNDARIES = 16


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; ``prompt`` may carry the text they came from, for the output.

    ``cache_boundaries`` are offsets, in tokens, behind which other prompts may go on otherwise:
    where a system prompt, tools or a message end. ``cache_ttls`` says for how many seconds at least
    the prefixes of some of them shall be kept, as far as the cap on pins allows. ``images`` are
    pictures that were read already, where they stand in the tokens.
    """

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    cache_boundaries: NotRequired[list[int]]
    cache_ttls: NotRequired[dict[int, float]]
    images: NotRequired[Sequence[ImageFeature]]


PromptType = str | list[int] | TextPrompt | TokensPrompt
