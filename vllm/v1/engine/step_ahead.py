"""One step ahead of the device: a step is scheduled and handed over while the last one runs.

    schedule k | begin k | take tokens of k-1 | schedule k+1 | begin k+1 | take tokens of k | ...
    device:      ...k-1 |--------- k ---------------------------------|-------- k+1 ...

Tokens of step k-1 go into step k on the device. What ends a request is seen a step late: what was
computed for it since then is dropped, and nothing of it is published.

Two kinds of steps are taken in the turn in which they begin: those that compute nothing, for what
they have to tell (a transfer that ended) must not wait for whatever comes next; and those that read
what a connector loads meanwhile, for a load that fails makes void what others would build on.
"""

from collections.abc import Mapping

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreOutputs
from vllm.v1.outputs import PendingStep

Outputs = Mapping[int, EngineCoreOutputs]


class StepAhead:
    """Owns: the step in flight, and what waits for the next turn to be told.

    Args:
        scheduler: Counts tokens in flight.
        executor: Begins steps.
    """

    def __init__(self, scheduler: AsyncScheduler, executor: Executor) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._in_flight: tuple[SchedulerOutput, PendingStep] | None = None
        self._untold: Outputs | None = None
        self._error: Exception | None = None

    @property
    def is_in_flight(self) -> bool:
        """Whether there is something to take or to tell: a step's results, or an error."""
        return not (self._in_flight is None and self._untold is None and self._error is None)

    @property
    def has_failed(self) -> bool:
        """Whether a step failed whose error the next turn raises."""
        return self._error is not None

    def take_untold(self) -> Outputs | None:
        """Return the outputs that the last turn had no place for; None: there are none.

        Raises:
            Exception: What a step of the last turn failed with.
        """
        if self._error is not None:
            raise self._error
        untold, self._untold = self._untold, None
        return untold

    def settle_if_needed(self) -> Outputs | None:
        """Take the tokens of the step in flight, if the next one cannot be scheduled without.

        Returns:
            Its outputs; None: it need not be waited for, or there is none.
        """
        return self._finish() if self._scheduler.needs_settled_tokens() else None

    def begin(self, plan: SchedulerOutput, settled: Outputs | None) -> Outputs:
        """Begin a step, then take the tokens of the one before.

        Args:
            plan: The step, just scheduled.
            settled: What ``settle_if_needed`` returned before.

        Returns:
            The outputs of the step before; if there was none, of this one or nothing.

        Raises:
            Exception: A step failed, and nobody waits for one before it.
        """
        try:
            begun = self._executor.begin_model(plan)
        except Exception as error:
            outputs = self._finish_before(error) if settled is None else settled
            # Raised in the next turn: who waits for the step before gets its tokens.
            self._error = error
            return outputs
        before = self._finish() if settled is None else settled
        self._in_flight = plan, begun
        if plan.total_num_scheduled_tokens and not plan.loads_within:
            return before or {}
        if before is None:
            return self._finish() or {}
        try:
            self._untold = self._finish()
        except Exception as error:
            self._error = error
        return before

    def _finish_before(self, error: Exception) -> Outputs:
        """Take the step before one that could not begin; if there is none to take, raise that."""
        try:
            outputs = self._finish()
        except Exception as later:
            # The executor is gone with the step that it could not begin.
            raise error from later
        if outputs is None:
            raise error
        return outputs

    def _finish(self) -> Outputs | None:
        if self._in_flight is None:
            return None
        (plan, begun), self._in_flight = self._in_flight, None
        return self._scheduler.update_from_output(plan, begun.wait())
