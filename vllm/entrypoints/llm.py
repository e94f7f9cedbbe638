"""``LLM``: offline inference in a few lines."""

import dataclasses
import itertools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast

import msgspec

from vllm.entrypoints.foreign_arguments import take_engine_arguments
from vllm.entrypoints.pooling.find_plan import find_plan
from vllm.entrypoints.pooling.vectors import read_rows
from vllm.entrypoints.progress import PromptProgress, UseTqdm
from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.inputs import PromptType, TokensPrompt
from vllm.logger import setup_logging
from vllm.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import ChatEncoder, ChatOptions, Tokenizer, make_chat_encoder
from vllm.tokenizers.chat_tokenizer import ChatTokenizer
from vllm.tokenizers.chat_tools import parse_tools
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.shown_chats import find_pictures, show
from vllm.v1.engine.submission import Submission
from vllm.v1.metrics.reader import Metric
from vllm.v1.request_options import RequestOptions

Messages = Sequence[Mapping[str, Any]]
# Prompts that reach the engine core at once; it hashes them before it begins with the first.
_MAX_TOGETHER = 256


class LLM:
    """A model and its engine, for programs that have their prompts at hand.

        with LLM("deepseek-v4", block_size=32) as llm:
            for output in llm.generate(["Hello"], SamplingParams(max_tokens=20)):
                print(output.outputs[0].text)

    The engine runs in a process of its own (``VLLM_ENABLE_V1_MULTIPROCESSING=0``: in this one) and
    stops with :meth:`shutdown`, at the end of the ``with`` block, when the object is collected or
    when Python ends.

    Owns: the engine, and the encoders of chats.

    Args:
        model: A folder, a hub id, or "deepseek-v4" for the embedded checkpoint.
        chat_template: A Jinja template, or its file, instead of the model's own chat format.
        allow_special_tokens_in_content: Whether special tokens spelled in a chat message become
            special; else they stay text.
        keep_billing_line: Whether prompts keep the billing line of Claude Code's system texts.
        **engine_args: As in ``EngineArgs``: ``max_model_len``, ``block_size``, ``dtype``. vLLM's
            others are judged as its flags are: without effect, or refused by name.

    Raises:
        ConfigError: An argument or the checkpoint's configuration is wrong.
        CheckpointError: The weights do not fit the model.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "deepseek-v4",
        *,
        chat_template: str | None = None,
        allow_special_tokens_in_content: bool = False,
        keep_billing_line: bool = False,
        **engine_args: Any,
    ) -> None:
        if not logging.getLogger("vllm").handlers:
            setup_logging()
        known = take_engine_arguments(engine_args)
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(model=os.fspath(model), **known))
        self._chat_template = chat_template
        self._allows_special_tokens = allow_special_tokens_in_content
        self._keeps_billing_line = keep_billing_line
        self._encoders: dict[str | None, ChatEncoder] = {}
        self._request_ids = itertools.count()
        self._images = self.llm_engine.images

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    # ---- generation --------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt; the engine batches them.

        Args:
            prompts: One prompt or several: texts, lists of token ids, TextPrompt, TokensPrompt.
                The last two may have ``multi_modal_data`` (docs/images.md).
            sampling_params: For all, or one each; None: the checkpoint's defaults.
            use_tqdm: Whether to show a progress bar, or what makes it, called as ``tqdm.tqdm`` is.
            priority: One value each, with ``scheduling_policy="priority"``.

        Returns:
            One output for each prompt, in order.

        Raises:
            UserInputError: A prompt or parameter is wrong; then none is answered.
        """
        items = _as_prompts(prompts)
        params = self._params_for(items, sampling_params)
        if priority is not None and len(priority) != len(items):
            raise UserInputError(
                f"priority has {len(priority)} values for {len(items)} prompts: give one each.",
                "priority",
            )
        options = [RequestOptions(priority=value) for value in priority or [0] * len(items)]
        return self._answer(items, params, options, use_tqdm)

    def _answer(
        self,
        items: Sequence[PromptType],
        params: Sequence[SamplingParams],
        options: Sequence[RequestOptions],
        use_tqdm: UseTqdm,
    ) -> list[RequestOutput]:
        """Return an output for each prompt, in order."""
        ids = [str(next(self._request_ids)) for _ in items]
        submissions = [
            Submission(request_id, prompt, own, options=told)
            for request_id, prompt, own, told in zip(ids, items, params, options, strict=True)
        ]
        try:
            for at in range(0, len(submissions), _MAX_TOGETHER):
                self.llm_engine.add_requests(submissions[at : at + _MAX_TOGETHER])
            return self._run(ids, use_tqdm)
        except BaseException:
            # Nobody will read the others; the next call must not meet them.
            self._abandon(ids)
            raise

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one chat or several, in the model's own chat format.

        Args:
            messages: A list of ``{"role", "content"}``, or a list of such lists. Contents may hold
                pictures, as OpenAI's API has them or as ``{"type": "image_pil", "image_pil": x}``.
            add_generation_prompt: Whether to open the assistant's turn.
            continue_final_message: Whether to go on with the last (assistant) message instead.
            reasoning_effort: "none" turns thinking off.
            chat_template: As the constructor's, for this call.
            tools: Functions the model may call, as OpenAI's API takes them; calls come as text.
            chat_template_kwargs: Further variables of the template.
            mm_processor_kwargs: Sizes of pictures, over those of the engine.

        Raises:
            UserInputError: A message or parameter is wrong; then none is answered.
        """
        encoder = self._find_encoder(chat_template or self._chat_template)
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            reasoning_effort=reasoning_effort,
            template_kwargs=chat_template_kwargs or {},
            tools=parse_tools(tools) if tools else (),
        )
        prompts: list[PromptType] = []
        for chat in _as_chats(messages):
            prompts.append(self._encode_chat(encoder, chat, options, mm_processor_kwargs))
        return self.generate(prompts, sampling_params, use_tqdm)

    def _encode_chat(
        self,
        encoder: ChatEncoder,
        chat: Messages,
        options: ChatOptions,
        settings: Mapping[str, Any] | None,
    ) -> TokensPrompt:
        pictures = find_pictures(chat, self._images, encoder, from_program=True)
        shown = show(pictures, self._images.read_now(pictures.given, settings), self._images)
        options = dataclasses.replace(options, images=shown.images)
        encoded = encoder.encode_chat(shown.messages, options)
        return TokensPrompt(
            prompt_token_ids=encoded.token_ids,
            prompt=encoded.text,
            images=[shown.read[index].at(offset) for index, offset in encoded.image_offsets],
        )

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        use_tqdm: UseTqdm = True,
        *,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return a vector for each text, as the checkpoint's own files say (docs/embeddings.md).

        Args:
            prompts: One text or several: texts, lists of token ids, TextPrompt, TokensPrompt.
            use_tqdm: As of ``generate``.
            prompt_name: Of the checkpoint's prompts, which to put in front of texts; None: its
                default.

        Raises:
            UserInputError: A text is wrong; then none is computed.
        """
        model = self.llm_engine.vllm_config.model_config
        plan = find_plan(model, self._require_tokenizer())
        before = plan.find_prompt(prompt_name, None, "prompt_name")
        given = [
            f"{before}{item}" if before and isinstance(item, str) else item
            for item in _as_prompts(prompts)
        ]
        if plan.renders or (before and plan.leaves_prompts_out):
            raise UnsupportedFeatureError(
                "This checkpoint's texts are messages of chats, or its prompts are left out: only "
                "a server makes such vectors (/v1/embeddings)."
            )
        params = _final_only(SamplingParams(max_tokens=1))
        options = RequestOptions(pooling=plan.params, is_spare=True)
        count = len(given)
        outputs = self._answer(given, [params] * count, [options] * count, use_tqdm)
        made: list[EmbeddingRequestOutput] = []
        for output in outputs:
            assert output.pooled is not None, "it asked for one"
            vector = plan.cut(plan.make_vector(read_rows(output.pooled), 0), None)
            made.append(
                EmbeddingRequestOutput(
                    output.request_id,
                    EmbeddingOutput(vector.tolist()),
                    list(output.prompt_token_ids or ()),
                    output.num_cached_tokens or 0,
                )
            )
        return made

    def _find_encoder(self, chat_template: str | None) -> ChatEncoder:
        """Return what encodes chats by a template; making it tries the template out."""
        encoder = self._encoders.get(chat_template)
        if encoder is None:
            encoder = self._encoders[chat_template] = make_chat_encoder(
                self.llm_engine.vllm_config.model_config.hf_config,
                self._require_tokenizer(),
                chat_template,
                allows_special_tokens=self._allows_special_tokens,
                keeps_billing_line=self._keeps_billing_line,
            )
        return encoder

    def _params_for(
        self,
        prompts: Sequence[PromptType],
        given: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [_final_only(given)] * len(prompts)
        if not isinstance(given, Sequence) or not all(
            isinstance(params, SamplingParams) for params in given
        ):
            raise UserInputError(
                "sampling_params must be a SamplingParams, or a list of them, not "
                f"{type(given).__name__}.",
                "sampling_params",
            )
        if len(given) != len(prompts):
            raise UserInputError(
                f"There are {len(prompts)} prompts but {len(given)} sampling_params: give one for "
                "all, or one each.",
                "sampling_params",
            )
        return [_final_only(params) for params in given]

    def _run(self, ids: list[str], use_tqdm: UseTqdm) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with PromptProgress(len(ids), use_tqdm) as progress:
            while len(done) < len(ids):
                for output in self.llm_engine.step():
                    if output.finished:
                        done[output.request_id] = output
                        progress.add(output)
        return [done[request_id] for request_id in ids]

    def _abandon(self, ids: list[str]) -> None:
        self.llm_engine.abort_request(ids)
        if self.llm_engine.has_unfinished_requests():
            self.llm_engine.step()

    # ---- the rest ----------------------------------------------------------------------------

    def get_tokenizer(self) -> ChatTokenizer | None:
        """Return the tokenizer, which renders chats, too; None with ``skip_tokenizer_init``."""
        tokenizer = self.llm_engine.get_tokenizer()
        if tokenizer is None:
            return None
        return ChatTokenizer(
            tokenizer, lambda template: self._find_encoder(template or self._chat_template)
        )

    def _require_tokenizer(self) -> Tokenizer:
        tokenizer = self.llm_engine.get_tokenizer()
        if tokenizer is None:
            raise UserInputError(
                "A chat needs the tokenizer, which skip_tokenizer_init leaves out.", "messages"
            )
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the checkpoint recommends."""
        return SamplingParams(**self.llm_engine.input_processor.get_default_sampling_params())

    def get_metrics(self) -> list[Metric]:
        """Return every metric as it stands: counters, gauges, histograms and vectors.

        Names are those of ``/metrics``, without the ``_total`` of counters.
        """
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False while requests use it."""
        return self.llm_engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Stop the engine. Idempotent."""
        self.llm_engine.shutdown()


def _final_only(params: SamplingParams) -> SamplingParams:
    """Only whole answers are returned here, so nothing else need be made."""
    return msgspec.structs.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


def _as_prompts(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """Tell one prompt from several; a list of ints is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [cast(PromptType, prompts)]
    # The bytes of a text are no token ids, though they are whole numbers.
    given: object = prompts
    if isinstance(given, bytes | bytearray) or not isinstance(given, Iterable):
        raise UserInputError(
            f"prompts={prompts!r} is neither a text, nor token ids, nor a list of prompts.",
            "prompts",
        )
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [cast(list[int], items)]
    return cast(list[PromptType], items)


def _as_chats(messages: Messages | Sequence[Messages]) -> Iterable[Messages]:
    if messages and isinstance(messages[0], Mapping):
        return [cast(Messages, messages)]
    return cast(Sequence[Messages], messages)
