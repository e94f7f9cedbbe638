"""One step ahead of the device: a step is scheduled and handed over while the last one runs.

    schedule k | begin k | take tokens of k-1 | schedule k+1 | begin k+1 | take tokens of k | ...
    device:      ...k-1 |--------- k ---------------------------------|-------- k+1 ...

Tokens of step k-1 go into step k on the device. What ends a request is seen a step late: what was
computed for it since then is dropped, and nothing of it is published.
"""

from collections.abc import Mapping

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreOutputs
from vllm.v1.worker.step_in_flight import PendingStep

Outputs = Mapping[int, EngineCoreOutputs]


class StepAhead:
    """Owns: the step in flight.

    Args:
        scheduler: Counts tokens in flight.
        executor: Begins steps.
    """

    def __init__(self, scheduler: AsyncScheduler, executor: Executor) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._in_flight: tuple[SchedulerOutput, PendingStep] | None = None

    @property
    def is_in_flight(self) -> bool:
        """Whether a step has begun that has orders, and whose tokens were not taken."""
        # One without is taken with the next, whenever that comes: an idle engine is idle.
        return self._in_flight is not None and self._in_flight[0].has_orders

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
            The outputs of the step before; empty: there was none.
        """
        begun = self._executor.begin_model(plan)
        outputs = self._finish() if settled is None else settled
        self._in_flight = (plan, begun)
        return {} if outputs is None else outputs

    def _finish(self) -> Outputs | None:
        if self._in_flight is None:
            return None
        (plan, begun), self._in_flight = self._in_flight, None
        return self._scheduler.update_from_output(plan, begun.wait())
