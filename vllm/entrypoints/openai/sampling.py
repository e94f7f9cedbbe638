"""From a request's fields to checked sampling parameters."""

from dataclasses import dataclass
from typing import Any

import msgspec

from vllm import envs
from vllm.entrypoints.openai.context import ServedModel
from vllm.entrypoints.openai.protocol.requests import EngineRequest, SamplingRequest
from vllm.entrypoints.openai.structured_fields import make_structured_outputs
from vllm.exceptions import ContextLengthError, UnsupportedFeatureError, UserInputError
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from vllm.v1.request_options import RequestOptions

_MAX_REQUEST_ID_CHARS = 256
# Optional fields that mean the same here and in SamplingParams.
_PLAIN_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


@dataclass(frozen=True, slots=True)
class LogprobsOptions:
    """How many most likely tokens to report; None: nothing, 0: the token itself only."""

    sampled: int | None = None
    prompt: int | None = None


def read_options(request: EngineRequest) -> RequestOptions:
    """Return the options that a request names: its fields of their names."""
    kind = type(request).options_type
    known = type(request).model_fields.keys() & set(kind.__struct_fields__)
    given = {name: getattr(request, name) for name in known}
    return kind(**{name: value for name, value in given.items() if value is not None})


def check_request(request: SamplingRequest, served_model: ServedModel) -> None:
    """Check the shared fields that SamplingParams does not.

    Raises:
        UserInputError: One is wrong.
    """
    limit = envs.VLLM_MAX_STOP_STRINGS
    if isinstance(request.stop, list) and len(request.stop) > limit:
        raise UserInputError(
            f"stop holds {len(request.stop)} strings: at most {limit} are allowed "
            "(VLLM_MAX_STOP_STRINGS).",
            "stop",
        )
    for token_id in request.stop_token_ids or ():
        check_token_id(token_id, served_model.vocab_size, "stop_token_ids")
    if request.stream_options is not None and not request.stream:
        raise UserInputError("stream_options needs stream=true.", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise UserInputError(
            "prompt_logprobs is not available in a stream: set stream to false.", "prompt_logprobs"
        )
    check_options(request, served_model)
    _check_transfer(request, served_model)


def check_options(request: EngineRequest, served_model: ServedModel) -> None:
    """Check what a request says of itself, beside what is asked.

    Raises:
        UserInputError: A field is wrong.
    """
    read_options(request).check(has_priorities=served_model.has_priority)
    _check_request_id(request.request_id)


def _check_transfer(request: SamplingRequest, served_model: ServedModel) -> None:
    params = request.kv_transfer_params
    if not params:
        return
    if not served_model.has_kv_transfer:
        raise UnsupportedFeatureError(
            "kv_transfer_params need a server that was started with --kv-transfer-config: leave "
            "them out.",
            "kv_transfer_params",
        )
    try:
        msgspec.msgpack.encode(params)
    except OverflowError:
        raise UserInputError(
            "kv_transfer_params hold a number beyond 64 bits: send what the other server gave.",
            "kv_transfer_params",
        ) from None
    if params.get("do_remote_decode") and request.stream:
        raise UserInputError(
            "stream=true with kv_transfer_params.do_remote_decode: a whole answer tells where the "
            "prompt is held, set stream to false here.",
            "stream",
        )
    if params.get("do_remote_decode") and (request.n or 1) != 1:
        raise UserInputError(
            f"n={request.n} with kv_transfer_params.do_remote_decode: a prompt is prefilled once, "
            "use n=1 here and n on the decoding server.",
            "n",
        )


def _check_request_id(request_id: str | None) -> None:
    if request_id is None:
        return
    # It is written to the log: a line break would forge lines.
    if len(request_id) > _MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        raise UserInputError(
            f"request_id must be at most {_MAX_REQUEST_ID_CHARS} printable characters.",
            "request_id",
        )


def check_token_id(token_id: Any, vocab_size: int, param: str) -> None:
    """Check one token id.

    Raises:
        UserInputError: It is not a whole number within the vocabulary.
    """
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise UserInputError(
            f"{param} holds {str(token_id)[:40]}: token ids are whole numbers from 0 to "
            f"{vocab_size - 1}.",
            param,
        )


def check_logprobs(value: int | None, served_model: ServedModel, param: str) -> int | None:
    """Return how many likely tokens to report.

    Raises:
        UserInputError: More than the server allows.
    """
    if value is None:
        return None
    limit = served_model.max_logprobs
    if value < -1 or (limit != -1 and (value == -1 or value > limit)):
        allowed = "-1 (all) or more" if limit == -1 else f"0 to {limit} (--max-logprobs)"
        raise UserInputError(f"{param}={value} is not allowed: use {allowed}.", param)
    return min(value, served_model.vocab_size)


def resolve_max_tokens(
    asked: int | None,
    default: int | None,
    num_prompt_tokens: int,
    served_model: ServedModel,
    *,
    of_messages: bool = True,
) -> int:
    """Return the longest answer of a request.

    Args:
        asked: What the request says.
        default: When it says nothing; None: what is left of the context.
        num_prompt_tokens: Length of its prompt.
        served_model: The model's.
        of_messages: Whether the prompt is a chat.

    Raises:
        UserInputError: The prompt is empty or fills the context, or more than the context is asked.
    """
    limit = served_model.max_model_len
    if num_prompt_tokens == 0:
        raise UserInputError("The prompt is empty: give at least one token.", "prompt")
    room = limit - num_prompt_tokens
    if room < 1:
        num_asked = max(asked or default or 1, 1)
        raise ContextLengthError(num_prompt_tokens, limit, num_asked, of_messages=of_messages)
    if asked is not None and asked > limit:
        raise UserInputError(
            f"max_tokens={asked} is above the model's context of {limit} tokens: lower it.",
            "max_tokens",
        )
    # The server's own limit shortens an answer without an error, as the context does.
    wanted = (default if asked is None else asked, served_model.max_new_tokens)
    return min([room, *(count for count in wanted if count is not None)])


def make_sampling_params(
    request: SamplingRequest, served_model: ServedModel, max_tokens: int, logprobs: LogprobsOptions
) -> SamplingParams:
    """Build the parameters of one prompt.

    Raises:
        UserInputError: A value is out of range.
    """
    fields: dict[str, Any] = dict(served_model.default_sampling)
    for name in _PLAIN_FIELDS:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    # Ranks beyond the vocabulary mean "off", and must not overflow the wire's integers.
    top_k = fields.get("top_k", 0)
    if top_k >= served_model.vocab_size:
        fields["top_k"] = 0
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(
        max_tokens=max_tokens,
        stop_token_ids=list(request.stop_token_ids or ()),
        logprobs=logprobs.sampled,
        prompt_logprobs=logprobs.prompt,
        output_kind=kind,
        structured_outputs=make_structured_outputs(request),
        repetition_detection=_read_repetition(request),
        extra_args=(
            {"kv_transfer_params": request.kv_transfer_params}
            if request.kv_transfer_params
            else None
        ),
        **fields,
    )


def _read_repetition(request: SamplingRequest) -> RepetitionDetectionParams | None:
    given = request.repetition_detection
    if given is None:
        return None
    if given.model_extra:
        raise UserInputError(
            f"repetition_detection has no field {min(given.model_extra)!r:.80}: use "
            f"{', '.join(type(given).model_fields)}.",
            "repetition_detection",
        )
    return RepetitionDetectionParams(**given.model_dump(exclude_none=True))
