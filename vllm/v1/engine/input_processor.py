"""From what a caller gives to a checked request for the engine core."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import ContextLengthError, TextLengthError, UserInputError
from vllm.inputs import PromptType, TextPrompt, TokensPrompt
from vllm.multimodal.inputs import ImageFeature
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.generation_defaults import answer_limit, sampling_defaults
from vllm.v1.engine.params_completion import complete_from_tokenizer
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.request_options import NO_OPTIONS, RequestOptions

_PROMPT_FIELDS = TextPrompt.__annotations__.keys() | TokensPrompt.__annotations__.keys()


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt in one form: its tokens, its text where it is known, the options it brings."""

    token_ids: list[int]
    text: str | None
    options: RequestOptions = NO_OPTIONS
    images: tuple[ImageFeature, ...] = ()


class InputProcessor:
    """Tokenizes and checks requests; every refusal names the field at fault.

    Args:
        vllm_config: Its model length must be final (the engine core is ready).
        tokenizer: None: prompts must be token ids, and no text comes out.
    """

    def __init__(self, vllm_config: VllmConfig, tokenizer: Tokenizer | None) -> None:
        self._model_config = vllm_config.model_config
        self._num_cores = vllm_config.parallel_config.data_parallel_size
        self._is_priority = vllm_config.scheduler_config.policy == "priority"
        self._tokenizer = tokenizer
        ends = {"eos_token_id": self._model_config.end_token_ids}
        self._generation_config = {**self._model_config.generation_config, **ends}
        known = tokenizer.vocab_size if tokenizer is not None else 0
        self._vocab_size = int(self._model_config.hf_config.get("vocab_size", known))
        self._placeholders = frozenset(self._model_config.placeholder_ids)
        self._eos_token_id = self._find_eos_token_id()

    def _find_eos_token_id(self) -> int | None:
        if self._tokenizer is not None and self._tokenizer.eos_token_id is not None:
            return self._tokenizer.eos_token_id
        return next(iter(self._model_config.end_token_ids), None)

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self._model_config.max_model_len

    def get_default_sampling_params(self) -> dict[str, Any]:
        """Return the sampling defaults that the checkpoint's generation config sets."""
        limit = answer_limit(self._generation_config)
        return {
            **sampling_defaults(self._generation_config),
            **({} if limit is None else {"max_tokens": limit}),
        }

    # ---- prompts -----------------------------------------------------------------------------

    def parse_prompt(self, prompt: PromptType) -> ParsedPrompt:
        """Bring a prompt into one form. Pure; slow for long texts, so threads may run it.

        Raises:
            UserInputError: It is of no known form, or text without a tokenizer.
        """
        if isinstance(prompt, str):
            return ParsedPrompt(self._encode(prompt), prompt)
        if isinstance(prompt, Mapping):
            return self._parse_mapping(prompt)
        if isinstance(prompt, list):
            return ParsedPrompt(list(prompt), None)
        raise UserInputError(
            "prompt must be a text, a list of token ids, or an object with prompt or "
            f"prompt_token_ids, not {type(prompt).__name__}.",
            "prompt",
        )

    def _parse_mapping(self, prompt: Mapping[str, Any]) -> ParsedPrompt:
        for name in prompt.keys() - _PROMPT_FIELDS:
            if prompt[name]:
                raise UserInputError(
                    f"prompt.{name} is not supported: only texts and token ids are served, with "
                    "cache_salt, cache_boundaries and cache_ttls.",
                    "prompt",
                )
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise UserInputError(
                f"prompt.prompt must be a text, not {type(text).__name__}.", "prompt"
            )
        if token_ids is None:
            if text is None:
                raise UserInputError(
                    "The prompt object has neither prompt nor prompt_token_ids: give one.", "prompt"
                )
            token_ids = self._encode(text)
        options = RequestOptions(
            cache_salt=prompt.get("cache_salt"),
            cache_boundaries=list(prompt.get("cache_boundaries") or ()),
            cache_ttls=dict(prompt.get("cache_ttls") or {}),
        )
        images = tuple(prompt.get("images") or ())
        if not all(isinstance(image, ImageFeature) for image in images):
            raise UserInputError(
                "prompt.images takes pictures that were read: use multi_modal_data.", "prompt"
            )
        return ParsedPrompt(list(token_ids), text, options, images)

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise UserInputError(
                "This engine runs without a tokenizer (skip_tokenizer_init): give token ids.",
                "prompt",
            )
        if not text:
            raise UserInputError("The prompt is empty: give at least one token.", "prompt")
        return self._tokenizer.encode(text)

    def _check_prompt(
        self,
        token_ids: list[int],
        images: Sequence[ImageFeature] = (),
        *,
        has_answer: bool = True,
    ) -> None:
        if not token_ids:
            raise UserInputError("The prompt is empty: give at least one token.", "prompt")
        if set(map(type, token_ids)) != {int}:
            raise UserInputError("prompt_token_ids must be whole numbers.", "prompt")
        self._check_ids("prompt", token_ids)
        self._check_placeholders(token_ids, images)
        limit = self.max_model_len
        if has_answer and len(token_ids) >= limit:
            raise ContextLengthError(len(token_ids), limit)
        if len(token_ids) > limit:
            raise TextLengthError(len(token_ids), limit)

    def _check_placeholders(self, token_ids: Sequence[int], images: Sequence[ImageFeature]) -> None:
        """Refuse ids in whose places pictures and the like belong, where there is none."""
        at = 0
        for image in (*images, None):
            begin = len(token_ids) if image is None else image.offset
            if begin < at:
                raise UserInputError("The pictures of a prompt must be in its order.", "prompt")
            between = token_ids[at:begin] if images else token_ids
            if not self._placeholders.isdisjoint(between):
                found = next(i for i in between if i in self._placeholders)
                raise UserInputError(
                    f"prompt holds the token id {found}, in whose place an image, audio or video "
                    "belongs, and none is given for it: leave it out.",
                    "prompt",
                )
            at = begin if image is None else image.end
        if at > len(token_ids):
            raise UserInputError("A picture of the prompt lies behind its end.", "prompt")

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        size = self._vocab_size
        if token_ids and size and not (min(token_ids) >= 0 and max(token_ids) < size):
            wrong = next(i for i in token_ids if not 0 <= i < size)
            raise UserInputError(
                f"{name} holds the token id {wrong}, which is out of the vocabulary: ids go from 0 "
                f"to {size - 1}.",
                name,
            )

    # ---- parameters --------------------------------------------------------------------------

    def _complete_params(self, params: SamplingParams, prompt: Sequence[int]) -> SamplingParams:
        """Check parameters against the model; return a copy with its defaults filled in."""
        limit, num_prompt_tokens = self.max_model_len, len(prompt)
        if params.max_tokens is not None and params.max_tokens > limit:
            raise UserInputError(
                f"max_tokens={params.max_tokens} is above the context of {limit} tokens.",
                "max_tokens",
            )
        room = limit - num_prompt_tokens
        if params.min_tokens > room:
            raise UserInputError(
                f"min_tokens={params.min_tokens} does not fit: the prompt of {num_prompt_tokens} "
                f"tokens leaves {room} of the context's {limit}.",
                "min_tokens",
            )
        if params.logprob_token_ids is None:
            self._check_logprobs("logprobs", params.logprobs)
        self._check_logprobs("prompt_logprobs", params.prompt_logprobs)
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("logit_bias", list(params.logit_bias or ()))
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logprob_token_ids", params.logprob_token_ids or ())
        self._check_stop(params)
        complete = params.clone()
        complete_from_tokenizer(complete, prompt, self._tokenizer)
        complete.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        complete.update_from_generation_config(self._generation_config, self._eos_token_id)
        return complete

    def _check_logprobs(self, name: str, value: int | None) -> None:
        most = self._model_config.max_logprobs
        if value is None or most == -1:
            return
        asked = self._vocab_size if value == -1 else value
        if asked > most:
            raise UserInputError(
                f"{name}={value} asks for {asked} log probabilities a token, at most {most} are "
                "allowed (--max-logprobs).",
                name,
            )

    def _check_stop(self, params: SamplingParams) -> None:
        if params.stop_strings and (self._tokenizer is None or not params.detokenize):
            raise UserInputError(
                "stop needs text, but this request has no detokenization: use stop_token_ids.",
                "stop",
            )

    def _truncate(self, prompt: ParsedPrompt, params: SamplingParams) -> ParsedPrompt:
        """Keep the prompt's last tokens, as many as the request says."""
        if params.truncate_prompt_tokens is None:
            return prompt
        kept = truncate_prompt(
            prompt.token_ids,
            params.truncate_prompt_tokens,
            self.max_model_len,
            params.max_tokens or 1,
        )
        if len(kept) == len(prompt.token_ids):
            return prompt
        if prompt.images:
            raise UserInputError(
                "truncate_prompt_tokens would cut a prompt with pictures: leave it out.",
                "truncate_prompt_tokens",
            )
        # Offsets were those of the whole prompt.
        options = prompt.options.replace(cache_boundaries=[], cache_ttls={})
        return ParsedPrompt(kept, None, options)

    # ---- all together ------------------------------------------------------------------------

    def process(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        params: SamplingParams,
        options: RequestOptions = NO_OPTIONS,
        *,
        arrival_time: float | None = None,
    ) -> EngineCoreRequest:
        """Check a request and fill in the model's defaults.

        Args:
            request_id: Names it.
            prompt: Its prompt, with the options that came with it.
            params: How to answer.
            options: Go before those of the prompt.
            arrival_time: Monotonic seconds; None: now.

        Raises:
            UserInputError: Something is wrong; ``param`` names the field.
        """
        told = options.over(prompt.options)
        headers = told.trace_headers
        told = told.replace(trace_headers=dict(headers) if headers else None)
        prompt = self._truncate(replace(prompt, options=told), params)
        pooling = prompt.options.pooling
        self._check_prompt(prompt.token_ids, prompt.images, has_answer=pooling is None)
        prompt.options.check(has_priorities=self._is_priority, num_cores=self._num_cores)
        prompt.options.check_offsets(len(prompt.token_ids))
        if pooling is None:
            params = self._complete_params(params, prompt.token_ids)
        else:
            params = SamplingParams(
                max_tokens=1, temperature=0.0, detokenize=False, output_kind=params.output_kind
            )
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            options=prompt.options,
            images=list(prompt.images),
        )


def truncate_prompt(
    token_ids: list[int], wanted: int, max_model_len: int, max_tokens: int, side: str = "left"
) -> list[int]:
    """Return the part of a prompt that ``truncate_prompt_tokens`` leaves.

    Args:
        token_ids: The prompt.
        wanted: Tokens to keep at most; -1: as many as leave room for ``max_tokens``.
        max_model_len: Tokens of the context.
        max_tokens: Of the answer.
        side: Where tokens go: "left" or "right".

    Raises:
        UserInputError: ``wanted`` does not fit into the context.
    """
    if wanted > max_model_len:
        raise UserInputError(
            f"truncate_prompt_tokens={wanted} is above the context of {max_model_len} tokens: "
            "lower it, or use -1.",
            "truncate_prompt_tokens",
        )
    num_kept = max(1, max_model_len - max_tokens) if wanted == -1 else wanted
    return token_ids[:num_kept] if side == "right" else token_ids[-num_kept:]
