"""Serve's request router, carrying the fleet's.

Serve copies this module by value into the processes that call replicas, so nothing that must be one
in a process may stand here.
"""

from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from vllm.ray_serve.placement import Anyone, Only, Place, find_fleet


class FleetRequestRouter(RequestRouter):  # type: ignore[misc]  # untyped where ray is missing
    """Chooses replicas for Serve as the fleet's router does."""

    def initialize_state(self, fleet: str = "", **_: Any) -> None:
        """Take the arguments of ``request_router_kwargs``."""
        self._fleet_name = fleet

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note which replicas serve."""
        super().update_replicas(replicas)
        fleet = find_fleet(self._fleet_name)
        if fleet is not None:
            fleet.see([replica.replica_id.unique_id for replica in replicas])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica."""
        super().on_replica_actor_died(replica_id)
        fleet = find_fleet(self._fleet_name)
        if fleet is not None:
            fleet.lose(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return who may get a call, best first."""
        call = Anyone()
        if pending_request is not None:
            # Asked again at once, its event loop would never hear of other replicas.
            pending_request.routing_context.should_backoff = True
            if pending_request.args:
                call = pending_request.args[0]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        fleet = find_fleet(self._fleet_name)
        if isinstance(call, Only) and call.replica in by_name:
            return [[by_name[call.replica]]]
        if isinstance(call, Place) and fleet is not None:
            fleet.see(list(by_name))
            name = fleet.place(call.request_id, list(by_name))
            return [[by_name[name]]] if name is not None else []
        return [list(by_name.values())]
