"""How waiting requests are admitted: whom the pass asks, and what is counted."""

from unittest.mock import Mock

from tests.v1.core.sched.builders import all_blocks_free, make_request, make_scheduler, run_all
from tests.v1.core.sched.fake_executor import FakeExecutor, scripted
from vllm.v1.core.sched.scheduler import Scheduler


def make_with_prefix() -> Scheduler:
    """Return a scheduler that has 48 tokens of 7 cached."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("first", [7] * 48, max_tokens=1))
    executor = FakeExecutor(scheduler.kv_cache_config, scripted({}), scheduler.kv_cache_manager)
    run_all(scheduler, executor)
    assert all_blocks_free(scheduler)
    return scheduler


def test_wrapped_methods_of_the_manager_see_every_admission() -> None:
    scheduler = make_with_prefix()
    manager = scheduler.kv_cache_manager
    looked_up = Mock(side_effect=manager.get_computed_blocks)
    allocated = Mock(side_effect=manager.allocate_slots)
    manager.get_computed_blocks = looked_up  # type: ignore[method-assign]
    manager.allocate_slots = allocated  # type: ignore[method-assign]
    request = make_request("0", [7] * 48)
    scheduler.add_request(request)
    assert scheduler.schedule().num_scheduled_tokens == {"0": 16}
    looked_up.assert_called_once_with(request)
    hit = allocated.call_args.kwargs
    assert hit["num_new_computed_tokens"] == 32
    assert hit["new_computed_blocks"].get_block_ids() == ([1, 2],)


def test_replaced_get_computed_blocks_decides_what_a_hit_is() -> None:
    scheduler = make_with_prefix()
    manager = scheduler.kv_cache_manager
    nothing = (manager.empty_kv_cache_blocks, 0)
    manager.get_computed_blocks = Mock(return_value=nothing)  # type: ignore[method-assign]
    scheduler.add_request(make_request("0", [7] * 48))
    assert scheduler.schedule().num_scheduled_tokens == {"0": 48}
