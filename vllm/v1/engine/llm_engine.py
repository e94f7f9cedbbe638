"""The synchronous engine: add requests, step, read outputs."""

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError, EngineError
from vllm.inputs import PromptType
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.client import EngineCoreHandle
from vllm.v1.engine.engine_setup import adopt_ready, load_tokenizer
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.launch import launch_sync_engine_core
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.wire import (
    AbortRequests,
    AddRequest,
    Dead,
    FromCore,
    KVCacheInfo,
    PrefixCacheReset,
    RequestRejected,
    ResetPrefixCache,
    StepOutputs,
)
from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.loggers import StatLogger, TotalsStatLogger

if TYPE_CHECKING:
    from vllm.v1.engine.engine_args import EngineArgs


class LLMEngine:
    """Owns: the engine core's handle, the requests in progress.

    Not thread-safe.

    Args:
        vllm_config: What to run.
        handle: A launched core; None: one is launched here.
        stat_loggers: Sinks of statistics, beside the totals of :meth:`get_metrics`.

    Raises:
        VllmError: The core cannot start.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        handle: EngineCoreHandle | None = None,
        *,
        stat_loggers: Sequence[StatLogger] = (),
    ) -> None:
        self.vllm_config = vllm_config
        self._core = handle if handle is not None else launch_sync_engine_core(vllm_config)
        self._finalizer = weakref.finalize(self, self._core.shutdown)
        try:
            # While the core loads its weights.
            self.tokenizer = load_tokenizer(vllm_config)
            self.kv_cache_info: KVCacheInfo = adopt_ready(vllm_config, self._core.wait_ready())
        except BaseException:
            self._finalizer()
            raise
        self.input_processor = InputProcessor(vllm_config, self.tokenizer)
        self._output_processor = OutputProcessor(self.tokenizer)
        self._totals = TotalsStatLogger()
        self._stat_loggers: tuple[StatLogger, ...] = (self._totals, *stat_loggers)
        self._pending: list[RequestOutput] = []
        self._num_calls = 0

    @classmethod
    def from_engine_args(cls, engine_args: "EngineArgs") -> Self:
        """Build the engine that command-line style arguments describe."""
        return cls(engine_args.create_vllm_config())

    # ---- requests ----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        """Queue a request for the following steps.

        Raises:
            UserInputError: Something about it is wrong.
            EngineDeadError: The core is dead.
        """
        self._check_alive()
        parsed = self.input_processor.parse_prompt(prompt)
        request = self.input_processor.process(
            request_id,
            parsed,
            params,
            priority=priority,
            cache_salt=cache_salt,
            trace_headers=trace_headers,
        )
        for child in self._output_processor.add_request(request, parsed.text, None):
            self._core.send(AddRequest(child))

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """End requests; the next step returns what there is, with the reason "abort"."""
        stats = IterationStats()
        result = self._output_processor.abort_requests(request_ids, stats)
        self._pending.extend(result.outputs)
        if result.aborts:
            self._core.send(AbortRequests(result.aborts))
        self._record(None, stats)

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has anything left to return."""
        return self._output_processor.has_unfinished() or bool(self._pending)

    def get_num_unfinished_requests(self) -> int:
        """Return how many answers are in progress."""
        return self._output_processor.num_unfinished

    def step(self) -> list[RequestOutput]:
        """Wait for the core's next step and return what it brought.

        Raises:
            EngineDeadError: The core is dead.
            VllmError: The core refused a request.
        """
        outputs, self._pending = self._pending, []
        if outputs or not self._output_processor.has_unfinished():
            return outputs
        return self._take_in(self._core.next_message())

    def _take_in(self, message: FromCore) -> list[RequestOutput]:
        if isinstance(message, StepOutputs):
            stats = IterationStats()
            result = self._output_processor.process_outputs(message.outputs, stats)
            if result.aborts:
                self._core.send(AbortRequests(result.aborts))
            self._record(message.outputs.scheduler_stats, stats)
            return result.outputs
        if isinstance(message, RequestRejected):
            self._output_processor.reject(message.request_id, message.error.to_exception())
        elif isinstance(message, Dead):
            error = EngineDeadError(message.message)
            self._output_processor.fail_all(error)
            raise error
        return []

    def _record(self, scheduler_stats: Any, stats: IterationStats) -> None:
        for stat_logger in self._stat_loggers:
            stat_logger.record(scheduler_stats, stats)

    def _check_alive(self) -> None:
        if self._core.dead_error is not None:
            raise self._core.dead_error
        if not self._finalizer.alive:
            raise EngineError("The engine was shut down: build a new one.")

    # ---- the rest ----------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None with ``skip_tokenizer_init``."""
        return self.tokenizer

    def get_metrics(self) -> dict[str, float]:
        """Return counters since the start and current gauges, under the names of ``/metrics``."""
        return self._totals.get_metrics()

    def do_log_stats(self) -> None:
        """Have every statistics sink report."""
        for stat_logger in self._stat_loggers:
            stat_logger.log()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget every cached prefix; False while requests use it.

        Raises:
            EngineDeadError: The core is dead.
        """
        self._check_alive()
        self._num_calls += 1
        call_id = self._num_calls
        self._core.send(ResetPrefixCache(call_id, reset_running_requests, reset_connector))
        while True:
            message = self._core.next_message()
            if isinstance(message, PrefixCacheReset) and message.call_id == call_id:
                return message.success
            # Outputs of running requests; the next step returns them.
            self._pending.extend(self._take_in(message))

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop the core. Idempotent; also happens when the engine is collected or Python ends."""
        if self._finalizer.detach() is not None:
            self._core.shutdown(timeout)
