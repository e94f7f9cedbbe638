"""A request on its way into an engine, before it is checked."""

from dataclasses import dataclass

from vllm.inputs import PromptType
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.output_queue import OutputSink
from vllm.v1.request_options import NO_OPTIONS, RequestOptions


@dataclass(frozen=True, slots=True)
class CallPart:
    """What one request of a call that makes many counts for, where limits are checked.

    Attributes:
        num_requests: Requests of the call that are let in with this one, itself included; 0: it was
            let in with another.
        num_tokens: What is counted of their prompts, all together.
    """

    num_requests: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Submission:
    """One prompt and how to answer it.

    Those that are submitted together reach the engine core together: none of them begins before the
    others are there, so each finds what it shares with the first.

    Attributes:
        request_id: The caller's name of it.
        prompt: A text, token ids, or either with more about it.
        params: How to answer.
        sink: Where outputs go; None: ``step()`` returns them.
        options: What else its client says of it.
        part: What it counts for as part of a call; None: for itself.
    """

    request_id: str
    prompt: PromptType
    params: SamplingParams
    sink: OutputSink | None = None
    options: RequestOptions = NO_OPTIONS
    part: CallPart | None = None
