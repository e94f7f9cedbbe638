"""The parts of Ray that ``RayRanks`` uses, actors being objects of this process."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any


class RayActorError(Exception):
    """An actor is gone."""


class _Actor:
    """Owns: an object, and threads that run its methods."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self._pool = ThreadPoolExecutor(3)
        self._pending: list[Future[Any]] = []
        self.is_dead = False

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(name, arguments))

    def _call(self, name: str, arguments: Sequence[Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        if self.is_dead:
            future.set_exception(RayActorError("dead"))
            return future
        self._pending.append(future)
        loaded = [a.result() if isinstance(a, Future) else a for a in arguments]

        def run() -> None:
            result = getattr(self._made, name)(*loaded)
            if not future.done():
                future.set_result(result)

        self._pool.submit(run)
        return future

    def die(self) -> None:
        """End; what was asked for fails."""
        self.is_dead = True
        for future in self._pending:
            if not future.done():
                future.set_exception(RayActorError("dead"))
        self._pool.shutdown(wait=False)


class FakeRay:
    """Stands in for the module.

    Args:
        make: Makes the object of an actor of some rank.
        has_room: Whether the placement group becomes ready.
    """

    def __init__(self, make: Callable[[int], Any], *, has_room: bool = True) -> None:
        self._make, self._has_room = make, has_room
        self.actors: list[_Actor] = []
        self.options: list[dict[str, Any]] = []
        self.bundles: list[dict[str, float]] = []
        self.num_groups = 0
        self.exceptions = SimpleNamespace(RayActorError=RayActorError)
        self.util = SimpleNamespace(
            placement_group=self._place,
            remove_placement_group=self._remove,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=dict),
        )

    def _place(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        assert strategy == "PACK"
        self.bundles = bundles
        self.num_groups += 1
        return SimpleNamespace(wait=lambda timeout: self._has_room)

    def _remove(self, group: Any) -> None:
        del group
        self.num_groups -= 1

    def remote(self, actor_class: type) -> Any:
        """``ray.remote(cls).options(...).remote(rank)``."""
        assert actor_class.__name__ == "RankActor"

        def start(rank: int) -> _Actor:
            self.actors.append(_Actor(self._make(rank)))
            return self.actors[-1]

        def options(**given: Any) -> Any:
            self.options.append(given)
            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)

    def put(self, value: Any) -> "Future[Any]":
        """An object of the store."""
        future: Future[Any] = Future()
        future.set_result(value)
        return future

    def get(self, ref: Any) -> Any:
        """What a reference, or each of a list, stands for."""
        return [r.result(30) for r in ref] if isinstance(ref, list) else ref.result(30)

    def wait(self, refs: "list[Future[Any]]", timeout: float) -> tuple[list[Any], list[Any]]:
        """The references that are ready, and the others."""
        done, _ = wait(refs, timeout, FIRST_COMPLETED)
        return [r for r in refs if r in done], [r for r in refs if r not in done]

    def kill(self, actor: _Actor, *, no_restart: bool) -> None:
        """End an actor."""
        assert no_restart
        actor.die()

    def cluster_resources(self) -> dict[str, float]:
        """What the cluster has."""
        return {"CPU": 1.0}
