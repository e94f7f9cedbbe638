"""What tenants were served, and who is next: virtual counters of tokens.

Each tenant has a counter of the tokens it was served, each counted by what was done for it and all
divided by the tenant's weight. Of those that want something the one with the lowest counter goes
first, so that counters rise together and shares become as the weights. Nobody is held back while
there is room: who is alone gets everything.

    counter  A ----------*            A asked for nothing for a while: its counter is lifted to
             B ------------------*    the lowest of those that are served, so that it cannot
             C -------------------*   spend later what it did not want then
"""

from __future__ import annotations

from vllm.config.tenants import TenantsConfig

# Priority class, counter, and when it was served last: of equals the one that waited longer.
Rank = tuple[int, float, int]


class FairShares:
    """The counters.

    Owns: the counters, and how many requests of each tenant are alive.

    Args:
        config: The tenants and what tokens count.
        max_lag: Weighted tokens by which one that always had something alive may be behind when it
            asks for more; it gets those before the others.
    """

    def __init__(self, config: TenantsConfig, max_lag: float) -> None:
        self._config = config
        self._max_lag = max_lag
        self._counters = dict.fromkeys(config.tenants, 0.0)
        self._num_alive = dict.fromkeys(config.tenants, 0)
        self._served = dict.fromkeys(config.tenants, 0)
        self._num_charges = 0
        # By class: where the counter stood of the one that was served last before all were idle.
        self._floors: dict[int, float] = {}

    def name_of(self, tenant: str | None) -> str:
        """Return the tenant under which a request counts."""
        return self._config.find(tenant).name

    def rank(self, tenant: str) -> Rank:
        """Return where a tenant stands; the lowest goes first."""
        priority = self._config.tenants[tenant].priority
        return priority, self._counters[tenant], self._served[tenant]

    def weight(self, tenant: str) -> float:
        """Return a tenant's weight."""
        return self._config.tenants[tenant].weight

    def counter(self, tenant: str) -> float:
        """Return the weighted tokens a tenant was served, or was lifted by."""
        return self._counters[tenant]

    def arrive(self, tenant: str) -> None:
        """A request of a tenant comes."""
        priority = self._config.tenants[tenant].priority
        others = [
            self._counters[name]
            for name, count in self._num_alive.items()
            if count and name != tenant and self._config.tenants[name].priority == priority
        ]
        is_alive = self._num_alive[tenant] > 0
        if others:
            floor = min(others) - (self._max_lag if is_alive else 0.0)
        else:
            floor = self._counters[tenant] if is_alive else self._floors.get(priority, 0.0)
        self._counters[tenant] = max(self._counters[tenant], floor)
        self._num_alive[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of a tenant ended, however."""
        assert self._num_alive[tenant] > 0
        self._num_alive[tenant] -= 1
        priority = self._config.tenants[tenant].priority
        self._floors[priority] = max(self._floors.get(priority, 0.0), self._counters[tenant])

    def has_others(self, tenant: str) -> bool:
        """Whether another tenant has a request that is alive."""
        return any(count for name, count in self._num_alive.items() if name != tenant)

    @property
    def are_contested(self) -> bool:
        """Whether several tenants want something."""
        return sum(map(bool, self._num_alive.values())) > 1

    def charge(
        self, tenant: str, *, num_input: int = 0, num_cached: int = 0, num_output: int = 0
    ) -> None:
        """Count tokens that a tenant was served.

        Args:
            tenant: Its name.
            num_input: Of prompts, computed.
            num_cached: Of prompts, found in a cache.
            num_output: Of answers.
        """
        weights = self._config.token_weights
        served = weights.input * num_input + weights.cached * num_cached
        served += weights.output * num_output
        self._counters[tenant] += served / self._config.tenants[tenant].weight
        self._num_charges += 1
        self._served[tenant] = self._num_charges
