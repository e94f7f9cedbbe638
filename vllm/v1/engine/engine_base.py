"""What both engines do: start a core, send it requests, take in what it says, forget its cache."""

import itertools
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, Generic, TypeVar

from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError
from vllm.logger import init_logger
from vllm.multimodal.image_input import ImageInput
from vllm.outputs import RequestOutput
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.client import EngineCoreHandle
from vllm.v1.engine.image_prompts import SeeingPrompt
from vllm.v1.engine.image_setup import make_image_input
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.pending_calls import PendingCalls
from vllm.v1.engine.questions import Question
from vllm.v1.engine.submission import Submission
from vllm.v1.engine.wire import (
    AbortRequests,
    AddRequests,
    Answer,
    CoreBack,
    CoreLost,
    Dead,
    FromCore,
    KVCacheInfo,
    Ready,
    RequestRejected,
    StepOutputs,
    WithdrawPrefixes,
)
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.loggers import StatLogger
from vllm.v1.metrics.stats import SchedulerStats

logger = init_logger(__name__)

_Handle = TypeVar("_Handle", bound=EngineCoreHandle)


class EngineBase(Generic[_Handle]):
    """One engine core and the requests in progress there; how messages arrive is the child's.

    Owns: the handle, the requests in progress, the sinks of statistics.

    Args:
        vllm_config: What to run.
        handle: A launched core.
        stat_loggers: Sinks of statistics.
        further_stat_loggers: Those of the second engine core on, where there are several.

    Raises:
        VllmError: The core cannot start.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        handle: _Handle,
        stat_loggers: Iterable[StatLogger],
        further_stat_loggers: Iterable[Iterable[StatLogger]] = (),
    ) -> None:
        self.vllm_config = vllm_config
        self._core = handle
        self._finalizer = weakref.finalize(self, handle.shutdown)
        try:
            # While the core loads its weights.
            self.tokenizer = _load_tokenizer(vllm_config)
            self.kv_cache_info: KVCacheInfo = _adopt_ready(vllm_config, handle.wait_ready())
        except BaseException:
            self._finalizer()
            raise
        self.input_processor = InputProcessor(vllm_config, self.tokenizer)
        self._output_processor = OutputProcessor(self.tokenizer)
        # By engine core; one without sinks of its own reports with the first.
        self._stat_loggers = (tuple(stat_loggers), *map(tuple, further_stat_loggers))
        self._calls = PendingCalls()

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None with ``skip_tokenizer_init``."""
        return self.tokenizer

    @property
    def living_ranks(self) -> Sequence[int]:
        """The engine cores that serve, by data parallel rank."""
        return self._core.living()

    def do_log_stats(self) -> None:
        """Have every statistics sink report."""
        for stat_logger in itertools.chain(*self._stat_loggers):
            stat_logger.log()

    def _record(
        self,
        scheduler_stats: SchedulerStats | None,
        stats: IterationStats | None,
        engine_index: int = 0,
    ) -> None:
        is_known = engine_index < len(self._stat_loggers)
        for stat_logger in self._stat_loggers[engine_index if is_known else 0]:
            stat_logger.record(scheduler_stats, stats)

    @cached_property
    def images(self) -> ImageInput:
        """What pictures of prompts go through."""
        return make_image_input(self.vllm_config)

    def _find_pictures(self, given: Submission) -> SeeingPrompt | None:
        """Return a prompt as one with pictures; None: it has none. Vectors are made of texts."""
        return None if given.options.pooling is not None else SeeingPrompt.find(given.prompt)

    # ---- to the core -------------------------------------------------------------------------

    def _send_requests(self, requests: list[EngineCoreRequest]) -> None:
        """Send checked requests, which the core takes in together."""
        if requests:
            self._core.send(AddRequests(requests))

    def _send_aborts(self, request_ids: list[str]) -> None:
        if request_ids:
            self._core.send(AbortRequests(request_ids))

    def withdraw_prefixes(self, names: Sequence[str]) -> None:
        """Have the core let go of prompts held for other engines, by their ``remote_request_id``.

        Unknown names are ignored.
        """
        self._core.send(WithdrawPrefixes(list(names)))

    def _send_question(self, question: Question[Any]) -> Future[Answer]:
        """Ask the core, or all of several; return what the answer comes to."""
        return self._calls.open(question.to_message, self._core.send)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the core is dead; None while it lives."""
        return self._core.dead_error

    def _check_alive(self) -> None:
        if self._core.dead_error is not None:
            raise self._core.dead_error

    # ---- from the core -----------------------------------------------------------------------

    def _take_in(self, message: FromCore) -> list[RequestOutput]:
        """Take in a message; return the outputs of requests without a sink.

        Raises:
            VllmError: The core refused a request without a sink, or died (see ``_on_dead``).
        """
        match message:
            case StepOutputs():
                return self._on_step(message)
            case RequestRejected(request_id, error):
                self._send_aborts(self._output_processor.reject(request_id, error.to_exception()))
            case Answer():
                self._calls.settle(message)
            case CoreLost(engine_index):
                # Nothing runs there: its gauges shall not tell what was.
                self._record(SchedulerStats(is_lost=True), None, engine_index)
            case CoreBack(engine_index):
                self._record(SchedulerStats(), None, engine_index)
            case Dead(reason):
                self._on_dead(EngineDeadError(reason))
        return []

    def _on_step(self, message: StepOutputs) -> list[RequestOutput]:
        stats = IterationStats()
        result = self._output_processor.process_outputs(message.outputs, stats)
        self._send_aborts(result.aborts)
        self._record(message.outputs.scheduler_stats, stats, message.outputs.engine_index)
        return result.outputs

    def _on_dead(self, error: EngineDeadError) -> None:
        """Tell every caller that the core is dead."""
        self._output_processor.fail_all(error)
        self._calls.fail_all(error)


def _load_tokenizer(vllm_config: VllmConfig) -> Tokenizer | None:
    """Read the tokenizer; None with ``skip_tokenizer_init``.

    Raises:
        ConfigError: Its files are absent or broken.
    """
    model = vllm_config.model_config
    if model.skip_tokenizer_init:
        return None
    return Tokenizer.from_folder(model.tokenizer or model.path or model.model)


def _adopt_ready(vllm_config: VllmConfig, ready: Ready) -> KVCacheInfo:
    """Take over what only the core could find out, and say that it is ready.

    Mutates:
        ``cache_config.num_gpu_blocks`` and ``model_config.max_model_len`` (when it was -1).
    """
    info = ready.kv_cache
    vllm_config.cache_config.num_gpu_blocks = info.num_blocks
    vllm_config.model_config.max_model_len = info.max_model_len
    logger.info(
        "Engine core ready (process %d) in %.2f s, of which %.2f s loading the model.",
        ready.pid,
        ready.start_s,
        ready.load_s,
    )
    return info
