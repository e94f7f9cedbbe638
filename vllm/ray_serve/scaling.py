"""How many replicas a load needs."""

import math
from typing import Any, Protocol

# Replicas go when they were too many for so long; they come at once.
_DOWN_DELAY_S = 60.0


class ScalingContext(Protocol):
    """What Serve says of the fleet; its ``AutoscalingContext`` is one."""

    aggregated_metrics: dict[str, dict[Any, float]] | None
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    current_time: float | None
    policy_state: dict[str, Any]


class LoadPolicy:
    """As many replicas as requests and prompt tokens that wait need, whichever is more.

    Args:
        target_requests: That a replica should have.
        target_prefill_tokens: Prompt tokens that it should have yet to compute.
    """

    def __init__(self, target_requests: float, target_prefill_tokens: float) -> None:
        self._targets = {"requests": target_requests, "prefill_tokens": target_prefill_tokens}

    def wanted(self, metrics: dict[str, dict[Any, float]], least: int, most: int) -> int:
        """Return the number that a load needs, within bounds.

        Args:
            metrics: By name and replica, as replicas report them.
            least: Fewest replicas.
            most: Most.
        """
        needs = [
            math.ceil(sum(metrics.get(name, {}).values()) / target)
            for name, target in self._targets.items()
        ]
        return min(most, max(least, *needs))

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas from now on, and what to remember."""
        state = dict(context.policy_state or {})
        current = context.target_num_replicas
        wanted = self.wanted(
            context.aggregated_metrics or {},
            context.capacity_adjusted_min_replicas,
            context.capacity_adjusted_max_replicas,
        )
        if wanted >= current:
            state.pop("low_since", None)
            return wanted, state
        now = context.current_time or 0.0
        since = state.setdefault("low_since", now)
        if now - since < _DOWN_DELAY_S:
            return current, state
        state.pop("low_since")
        return wanted, state
