"""Which request takes what, and what is held for whom, without a scheduler around it."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed.kv_transfer.handover.test_connector import PROMPT, params
from tests.v1.core.sched.builders import make_request
from vllm.distributed.kv_transfer.handover.orders import HandoverOrders
from vllm.distributed.kv_transfer.handover.params import RemotePrefix, digest_prompt, parse_params
from vllm.distributed.kv_transfer.handover.requests import Giving, Taking
from vllm.v1.core.pool.exports import PrefixBlocks
from vllm.v1.request import Request, RequestStatus

UNIT = 16


class Manager(SimpleNamespace):
    """Blocks for whoever asks, of a manager and of its coordinator."""

    @property
    def coordinator(self) -> "Manager":
        """Itself."""
        return self

    def find_import(self, request: Request, num_tokens: int, num_external: int) -> PrefixBlocks:
        """Return a table of no block, from the first token that is not here."""
        return PrefixBlocks(num_tokens, num_tokens - num_external, (0,), ((),))

    def export_prefix(self, lease: str, request: Request) -> PrefixBlocks | None:
        """Hold the whole units of a prompt."""
        self.held.add(lease)
        return PrefixBlocks(request.num_prompt_tokens // UNIT * UNIT, 0, (0,), ((1, 2),))

    def release_export(self, lease: str) -> None:
        """Let go."""
        self.held.remove(lease)


def make_manager(*, enable_caching: bool = True) -> Any:
    return Manager(enable_caching=enable_caching, held=set())


def take(taking: Taking, name: str, lease: str = "lease") -> Request:
    """Have a request ask for the first 48 of 50 tokens."""
    request = make_request(name, PROMPT)
    asked = parse_params(params(lease=lease))
    assert asked.takes is not None
    taking.add(request, asked.takes)
    return request


@pytest.mark.parametrize(("num_local", "expected"), [(0, 48), (16, 32), (47, 1), (48, 0), (49, 0)])
def test_only_what_is_not_here_is_loaded(num_local: int, expected: int) -> None:
    taking = Taking(make_manager(), UNIT)
    assert taking.find_tokens(take(taking, "a"), num_local) == expected


def test_who_has_all_of_it_does_not_wait_for_a_sibling() -> None:
    taking, orders = Taking(make_manager(), UNIT), HandoverOrders()
    first, second, third = (take(taking, name) for name in "abc")
    taking.begin(first, 48, orders)
    assert [load.request_id for load in orders.loads] == ["a"]
    assert taking.find_tokens(first, 0) == 0, "it is loading"
    assert taking.find_tokens(second, 0) is None
    assert taking.find_tokens(second, 32) is None
    assert taking.find_tokens(second, 48) == 0
    # Another lease, and a cache that keeps nothing, are no reason to wait.
    assert taking.find_tokens(take(taking, "d", "other"), 0) == 48
    third.skip_reading_prefix_cache = True
    assert taking.find_tokens(third, 0) == 0


def test_without_a_prefix_cache_every_sibling_loads() -> None:
    taking = Taking(make_manager(enable_caching=False), UNIT)
    first, second = (take(taking, name) for name in "ab")
    taking.begin(first, 48, HandoverOrders())
    assert taking.find_tokens(second, 0) == 48


def test_the_last_user_gives_a_lease_back() -> None:
    taking, orders = Taking(make_manager(), UNIT), HandoverOrders()
    first, second = (take(taking, name) for name in "ab")
    taking.begin(first, 48, orders)
    taking.end(first, orders)
    assert orders.cancelled == ["a"]
    taking.give_up(["a", "b", "unknown"], orders)
    assert orders.cancelled == ["a", "a"], "only loads are stopped"
    taking.end(second, orders)
    assert (len(taking), orders.returned) == (1, [])
    taking.settle("a", orders)
    taking.settle("a", orders)
    assert [prefix.lease for prefix in orders.returned] == ["lease"]
    assert len(taking) == 0


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_lease_ends_with_the_last_worker(num_workers: int) -> None:
    manager, orders = make_manager(), HandoverOrders()
    giving = Giving(
        manager,
        num_workers,
        lambda lease, blocks: RemotePrefix("e", "i", "h", 1, lease, blocks.num_tokens, ""),
    )
    request = make_request("a", PROMPT)
    giving.add(request)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    told = giving.end(request, orders)
    ((lease, blocks),) = orders.offers.items()
    assert told is not None
    # Who asks with it finds the lease, and that it is of these tokens.
    taken = parse_params({**told, "do_remote_prefill": True}).takes
    assert taken is not None
    assert (taken.lease, taken.num_tokens) == (lease, 48)
    assert taken.digest == digest_prompt(PROMPT[:48], None)
    assert blocks.num_tokens == 48
    assert giving.end(request, orders) is None, "it was asked for once"
    giving.withdraw(["unknown", lease], orders)
    assert orders.withdrawn == [lease]
    giving.release([("unknown", 5)])
    for _ in range(num_workers):
        assert manager.held == {lease}
        assert len(giving) == 1
        giving.release([(lease, 1)])
    assert not manager.held
    assert len(giving) == 0
