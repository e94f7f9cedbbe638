"""Where the fleet's requests go: who there is, and the router of ``-dp``; nothing of Ray.

A call of a replica names in its first argument what it is: a request goes where the router says, a
question to one replica there.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.engine.data_parallel.router import Router


@dataclass(frozen=True, slots=True)
class Anyone:
    """A call that any replica may answer."""


@dataclass(frozen=True, slots=True)
class Only:
    """A call for one replica; another one that gets it says that it is not the one.

    Attributes:
        replica: Its unique id.
    """

    replica: str


@dataclass(frozen=True, slots=True)
class Place:
    """A request that goes where the router says.

    Attributes:
        request_id: Its name; the ingress has told the fleet of its prompt.
    """

    request_id: str


@dataclass(slots=True)
class _Prompt:
    hashes: Sequence[int]
    num_tokens: int
    wanted: int | None
    key: int | None
    tenant: str | None = None
    rank: int | None = None
    name: str | None = None


class Fleet:
    """Which replicas there are, and where requests go. Any thread may call.

    Owns: ranks of replicas, the router once it is known what a cache looks like, prompts on their
    way.

    Args:
        num_places: Ranks that there are; a replica takes the lowest that is free.
    """

    def __init__(self, num_places: int) -> None:
        self._lock = threading.Lock()
        self._num_places = num_places
        self._ranks: dict[str, int] = {}
        self._leaving: dict[str, int] = {}
        self._dead: set[str] = set()
        self._prompts: dict[str, _Prompt] = {}
        self._num_open: dict[str, int] = {}
        self._router: Router | None = None

    @property
    def router(self) -> Router:
        """The router; ``start`` comes first."""
        assert self._router is not None
        return self._router

    def start(self, router: Router) -> None:
        """Take the router; nobody serves until he is seen."""
        with self._lock:
            self._router = router
            for rank in range(self._num_places):
                router.lose(rank)
            for rank in self._ranks.values():
                router.revive(rank)

    # ---- who there is ------------------------------------------------------------------------

    def see(self, replicas: Sequence[str]) -> None:
        """Note which replicas serve, by unique id; those that left finish what they have."""
        with self._lock:
            for name in [name for name in self._ranks if name not in replicas]:
                rank = self._leaving[name] = self._ranks.pop(name)
                if self._router is not None:
                    self._router.rest(rank)
                self._let_go(name)
            # Serve may list one for a while after its core died.
            self._dead.intersection_update(replicas)
            for name in replicas:
                if name in self._ranks or name in self._dead:
                    continue
                taken = {*self._ranks.values(), *self._leaving.values()}
                free = next((r for r in range(self._num_places) if r not in taken), None)
                place = self._leaving.pop(name, free)
                if place is None:
                    # Old ones still drain; it is seen again when one of them is gone.
                    continue
                self._ranks[name] = place
                if self._router is not None:
                    self._router.revive(place)

    def living(self) -> dict[str, int]:
        """Return the replicas that serve, and their ranks."""
        with self._lock:
            return dict(self._ranks)

    def rank_of(self, name: str) -> int | None:
        """Return the rank of a replica, one that leaves too; None: it is unknown."""
        with self._lock:
            return self._ranks.get(name, self._leaving.get(name))

    def lose(self, name: str) -> None:
        """Forget a replica that died; it is not seen again."""
        with self._lock:
            self._dead.add(name)
            rank = self._ranks.pop(name, None)
            rank = self._leaving.pop(name, None) if rank is None else rank
            if rank is not None and self._router is not None:
                self._router.lose(rank)

    def _let_go(self, name: str) -> None:
        if name in self._leaving and not self._num_open.get(name):
            rank = self._leaving.pop(name)
            if self._router is not None:
                self._router.lose(rank)

    # ---- requests ----------------------------------------------------------------------------

    def expect(
        self,
        request_id: str,
        hashes: Sequence[int],
        num_tokens: int,
        wanted: int | None,
        key: int | None = None,
        tenant: str | None = None,
    ) -> None:
        """Note the prompt of a request that will be placed; see ``Router.route_prompt``."""
        with self._lock:
            self._prompts[request_id] = _Prompt(hashes, num_tokens, wanted, key, tenant)

    def _move(self, prompt: _Prompt, name: str | None) -> None:
        """Note who has a request now; one that leaves keeps its rank until it has none."""
        old, prompt.name = prompt.name, name
        if name is not None:
            self._num_open[name] = self._num_open.get(name, 0) + 1
        if old is not None:
            self._num_open[old] -= 1
            if not self._num_open[old]:
                del self._num_open[old]
            self._let_go(old)

    def forget(self, request_id: str) -> None:
        """Forget a request."""
        self.router.end(request_id)
        with self._lock:
            prompt = self._prompts.pop(request_id, None)
            if prompt is not None:
                self._move(prompt, None)

    def place(self, request_id: str, names: Sequence[str]) -> str | None:
        """Return which of some replicas gets a request; None: it has left, or none is known.

        Asked again for one that it has placed (the replica refused it), it chooses anew. None means
        that Serve asks again in a moment, when it knows of other replicas.
        """
        with self._lock:
            prompt = self._prompts.get(request_id)
            by_rank = {self._ranks[name]: name for name in names if name in self._ranks}
        if prompt is None or not by_rank:
            return None
        if prompt.rank is not None:
            self.router.end(request_id)
            prompt.rank = None
        if not set(by_rank) & set(self.router.living()):
            return None
        if prompt.wanted is not None and prompt.wanted not in by_rank:
            return None
        prompt.rank = self.router.route_prompt(
            request_id,
            prompt.hashes,
            prompt.num_tokens,
            prompt.wanted,
            key=prompt.key,
            tenant=prompt.tenant,
        )
        with self._lock:
            if self._prompts.get(request_id) is prompt:
                self._move(prompt, by_rank.get(prompt.rank))
                return prompt.name
        # It was let go of meanwhile.
        self.router.end(request_id)
        return None

    def find_place(self, request_id: str) -> str | None:
        """Return the replica that a request was sent to last; None: none."""
        with self._lock:
            prompt = self._prompts.get(request_id)
            return None if prompt is None else prompt.name


# One for each fleet whose requests this process places, by name: Serve makes its request routers
# itself, and lets them have a name.
_FLEETS: dict[str, Fleet] = {}


def open_fleet(name: str, num_places: int) -> Fleet:
    """Return a new fleet, which Serve's request router of that name carries from now on."""
    _FLEETS[name] = Fleet(num_places)
    return _FLEETS[name]


def find_fleet(name: str) -> Fleet | None:
    """Return the fleet that this process places requests of; None: it has none of that name."""
    return _FLEETS.get(name)
