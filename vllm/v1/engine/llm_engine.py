"""The synchronous engine: add requests, step, read outputs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from prometheus_client import CollectorRegistry

from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError, EngineError
from vllm.inputs import PromptType
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.client import STOP_TIMEOUT_S, EngineCoreHandle
from vllm.v1.engine.engine_base import EngineBase
from vllm.v1.engine.image_prompts import scope_of
from vllm.v1.engine.launch import launch_sync_engine_core
from vllm.v1.engine.questions import Question, Reply, ResetCache
from vllm.v1.engine.submission import Submission
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.loggers import StatLogger
from vllm.v1.metrics.reader import Metric, get_metrics_snapshot
from vllm.v1.metrics.sinks import make_sinks
from vllm.v1.request_options import RequestOptions

if TYPE_CHECKING:
    from vllm.v1.engine.engine_args import EngineArgs


class LLMEngine(EngineBase[EngineCoreHandle]):
    """Serves one caller, who steps it. Not thread-safe.

    Args:
        vllm_config: What to run.
        handle: A launched core; None: one is launched here.
        stat_loggers: Sinks of statistics, beside the metrics of :meth:`get_metrics`.

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
        core = handle if handle is not None else launch_sync_engine_core(vllm_config)
        super().__init__(vllm_config, core, stat_loggers)
        self._registry = CollectorRegistry()
        model = vllm_config.model_config
        tenants = vllm_config.scheduler_config.tenants
        totals, others = make_sinks(
            self._registry,
            model.served_model_name,
            model.max_model_len,
            vllm_config.observability_config,
            external_source=vllm_config.external_source,
            has_tiers=vllm_config.has_tiers,
            tenants=() if tenants is None else tenants.tenants,
        )
        self._stat_loggers = ((*self._stat_loggers[0], totals, *others),)
        self._pending: list[RequestOutput] = []

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
        **options: Any,
    ) -> None:
        """Queue a request for the following steps; ``options`` are fields of ``RequestOptions``.

        Raises:
            UserInputError: Something about it is wrong.
            EngineDeadError: The core is dead.
        """
        given = RequestOptions(**options)
        self.add_requests([Submission(request_id, prompt, params, options=given)])

    def add_requests(self, submissions: Sequence[Submission]) -> None:
        """Queue requests for the following steps, all of them for the same one.

        Raises:
            UserInputError: Something about one is wrong; the ones before it are queued.
            EngineDeadError: The core is dead.
        """
        self._check_alive()
        children: list[EngineCoreRequest] = []
        try:
            for given in submissions:
                parsed = self.input_processor.parse_prompt(self._show(given))
                request = self.input_processor.process(
                    given.request_id, parsed, given.params, given.options
                )
                children += self._output_processor.add_request(request, parsed.text, given.sink)
        finally:
            self._send_requests(children)

    def _show(self, given: Submission) -> PromptType:
        """Return a prompt whose pictures are read and have their places in the tokens."""
        seeing = self._find_pictures(given)
        if seeing is None:
            return given.prompt
        salt = given.options.cache_salt or seeing.fields.get("cache_salt")
        read = self.images.read_now(seeing.given, seeing.settings, scope_of(salt))
        return seeing.with_images(read, self.images.family, self.tokenizer)

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """End requests; the next step returns what there is, with the reason "abort"."""
        stats = IterationStats()
        result = self._output_processor.abort_requests(request_ids, stats)
        self._pending.extend(result.outputs)
        self._send_aborts(result.aborts)
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

    def _on_dead(self, error: EngineDeadError) -> None:
        super()._on_dead(error)
        raise error

    def _check_alive(self) -> None:
        super()._check_alive()
        if not self._finalizer.alive:
            raise EngineError("The engine was shut down: build a new one.")

    # ---- the rest ----------------------------------------------------------------------------

    def get_metrics(self) -> list[Metric]:
        """Return every metric as it stands, under the names of ``/metrics``."""
        return get_metrics_snapshot(self._registry)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget every cached prefix; False while requests use it.

        Raises:
            EngineDeadError: The core is dead.
        """
        return self.ask(ResetCache(reset_running_requests, reset_connector))

    def ask(self, question: Question[Reply]) -> Reply:
        """Ask the core between two of its steps.

        Raises:
            EngineDeadError: The core is dead.
            VllmError: The question is refused.
        """
        self._check_alive()
        call = self._send_question(question)
        while not call.done():
            # Outputs of running requests meanwhile; the next step returns them.
            self._pending.extend(self._take_in(self._core.next_message()))
        return question.read(call.result())

    def shutdown(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Stop the core. Idempotent; also happens when the engine is collected or Python ends."""
        if self._finalizer.detach() is not None:
            self._core.shutdown(timeout)
