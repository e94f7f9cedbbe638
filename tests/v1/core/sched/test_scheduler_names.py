"""Old names of the scheduler, and the parts behind them."""

import pytest

from tests.v1.core.sched.builders import make_request, make_scheduler
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.scheduler_names import PartOf, SchedulerNames

NAMES = [name for name, value in vars(SchedulerNames).items() if isinstance(value, PartOf)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bare", [False, True])
def test_what_is_written_is_read(name: str, bare: bool) -> None:
    scheduler = object.__new__(Scheduler) if bare else make_scheduler()
    value = object()
    setattr(scheduler, name, value)
    assert getattr(scheduler, name) is value
    assert name not in vars(scheduler)


def test_parts_see_what_outsiders_exchange() -> None:
    scheduler = make_scheduler()
    cache = EncoderCacheManager(10)
    scheduler.encoder_cache_manager = cache
    scheduler.is_encoder_decoder = True
    held = scheduler._get_holdings()
    assert held.encoder.cache is cache
    assert held.encoder.is_encoder_decoder
    request = make_request("0", 10)
    scheduler.requests = {"0": request}
    assert held.requests.by_id == {"0": request}


def test_on_the_class_a_name_is_its_description() -> None:
    assert isinstance(Scheduler.requests, PartOf)
