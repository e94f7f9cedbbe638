"""What a tenant's next request waits for on each replica: what the tenant has there already."""

import numpy as np

from vllm.v1.engine.data_parallel.policy import Counts, find_standing_cost


class TenantLoads:
    """Requests in flight by tenant and replica.

    A replica serves its tenants in fair shares, so a request waits for those of its own tenant,
    each as many times as long as there are tenants to share with:

        standing cost = what the tenant's requests there cost * tenants that have requests there

    Chosen by the load of all, a tenant's requests would gather on some replicas by chance; where
    it had none, the others would share its part among them.

    Owns: the counts. What other front ends sent is not in them.

    Args:
        num_replicas: How many there are.
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        # By tenant, for each replica: requests, and prompt tokens yet to compute.
        self._requests: dict[str, list[int]] = {}
        self._backlogs: dict[str, list[int]] = {}
        self._num_tenants = [0] * num_replicas

    def add_replica(self) -> None:
        """Make room for one more."""
        self._num_replicas += 1
        self._num_tenants.append(0)
        for counts in (*self._requests.values(), *self._backlogs.values()):
            counts.append(0)

    def add(self, tenant: str, rank: int, backlog_tokens: int) -> None:
        """Note that a tenant's request was sent."""
        if tenant not in self._requests:
            self._requests[tenant] = [0] * self._num_replicas
            self._backlogs[tenant] = [0] * self._num_replicas
        self._num_tenants[rank] += not self._requests[tenant][rank]
        self._requests[tenant][rank] += 1
        self._backlogs[tenant][rank] += backlog_tokens

    def note_computed(self, tenant: str, rank: int, backlog_tokens: int) -> None:
        """Note that so much of a tenant's prompts is computed."""
        self._backlogs[tenant][rank] -= backlog_tokens

    def remove(self, tenant: str, rank: int) -> None:
        """Note that a tenant's request ended, whose prompt was noted as computed."""
        self._requests[tenant][rank] -= 1
        self._num_tenants[rank] -= not self._requests[tenant][rank]
        if not any(self._requests[tenant]):
            del self._requests[tenant], self._backlogs[tenant]

    def find_standing_costs(self, tenant: str) -> Counts:
        """Return what a tenant's next request waits for, by rank, in tokens."""
        costs = np.zeros(self._num_replicas, np.int64)
        if tenant in self._requests:
            own = zip(self._requests[tenant], self._backlogs[tenant], strict=True)
            costs[:] = [find_standing_cost(requests, backlog) for requests, backlog in own]
            costs *= self._num_tenants
        return costs
