"""The body of ``/v1/decisions`` and ``/v1/systemone``. What is in its fields is checked by hand."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictBool, WithJsonSchema

from vllm.entrypoints.openai.protocol.fields import DECISIONS
from vllm.entrypoints.openai.protocol.requests import EngineRequest, Text, Whole

InputField = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "A text, or messages, calls and their outputs in order.",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
        }
    ),
]
StateField = Annotated[
    Any, WithJsonSchema({"description": "System One's name of the input: a text, or any JSON."})
]
QuestionsField = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "1 to 400 questions; with a state, an object of them by id.",
            "anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "object"}],
        }
    ),
]


class DecisionsRequest(EngineRequest):
    """``POST /v1/decisions``: with ``input`` OpenAI's shape, with ``state`` System One's."""

    route: ClassVar[str] = DECISIONS

    input: InputField = None
    state: StateField = None
    questions: QuestionsField = None
    prompt_cache_options: dict[str, Any] | None = Field(None, description="mode and ttl.")
    safety_identifier: Text | None = Field(None, description="At most 128 characters.")
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_format_version: Whole | None = Field(
        None, description="Refuse to answer with prompts of another wording."
    )
    x_permutations: Whole | None = Field(
        None, description="Ask in so many orders of the options, and average; 1 to 16."
    )
    return_prompt_token_ids: StrictBool | None = Field(
        None, description="Tell each question's prompt, and the tokens of its labels."
    )
    return_label_logprobs: StrictBool | None = Field(
        None, description="Tell each label's log probability, and their mass."
    )
