"""Limits of tenants: buckets that fill, errors that say when to come back."""

import pytest

from vllm.config.tenants import Tenant, TenantsConfig
from vllm.exceptions import ConfigError, TenantLimitError
from vllm.v1.engine.tenant_limits import TenantLimits, check_parts, tenant_salt


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(tenant: Tenant, share: float = 1.0) -> tuple[TenantLimits, Clock]:
    clock = Clock()
    return TenantLimits(TenantsConfig.of(tenant), share, clock), clock


def admit(limits: TenantLimits, tenant: Tenant, num_tokens: int = 10, waiting: int = 0) -> None:
    limits.admit(tenant, num_tokens, lambda: waiting)


def test_requests_a_minute_come_evenly():
    tenant = Tenant("a", requests_per_minute=6)
    limits, clock = make(tenant)
    for _ in range(6):
        admit(limits, tenant)
    with pytest.raises(TenantLimitError, match="'a' exceeds requests_per_minute=6") as caught:
        admit(limits, tenant)
    assert caught.value.limit == "requests_per_minute"
    assert caught.value.retry_after_s == 10
    clock.now += caught.value.retry_after_s
    admit(limits, tenant)
    with pytest.raises(TenantLimitError):
        admit(limits, tenant)


def test_a_call_of_many_is_one_a_minute_and_waits_as_many() -> None:
    tenant = Tenant("a", requests_per_minute=1, max_queued_requests=5)
    limits, _ = make(tenant)
    with pytest.raises(TenantLimitError, match=r"2 of its requests .*, and this call brings 4"):
        limits.admit(tenant, 10, lambda: 2, 4)
    limits.admit(tenant, 10, lambda: 2, 3)
    with pytest.raises(TenantLimitError, match="requests_per_minute=1"):
        limits.admit(tenant, 10, lambda: 0, 1)


def test_answers_bring_a_debt():
    tenant = Tenant("a", tokens_per_minute=600)
    limits, clock = make(tenant)
    admit(limits, tenant, 100)
    limits.note_output("a", 1100)
    with pytest.raises(TenantLimitError, match="tokens_per_minute=600") as caught:
        admit(limits, tenant, 100)
    assert caught.value.retry_after_s == 70
    clock.now += 70
    admit(limits, tenant, 100)


def test_a_prompt_beyond_a_minutes_worth_waits_for_a_full_bucket():
    tenant = Tenant("a", tokens_per_minute=60)
    limits, clock = make(tenant)
    admit(limits, tenant, 1000)
    with pytest.raises(TenantLimitError) as caught:
        admit(limits, tenant, 1000)
    clock.now += caught.value.retry_after_s
    admit(limits, tenant, 1000)


def test_a_refused_request_spends_nothing():
    tenant = Tenant("a", requests_per_minute=1, tokens_per_minute=60)
    limits, _clock = make(tenant)
    limits.note_output("a", 60)
    for _ in range(3):
        with pytest.raises(TenantLimitError, match="tokens_per_minute"):
            admit(limits, tenant)
    assert limits._requests["a"].wait_s(1, 100.0) == 0


def test_waiting_requests_are_bounded():
    tenant = Tenant("a", max_queued_requests=2)
    limits, _clock = make(tenant)
    admit(limits, tenant, waiting=1)
    with pytest.raises(TenantLimitError, match="max_queued_requests=2: 2 of its requests"):
        admit(limits, tenant, waiting=2)


def test_several_processes_share_the_limits():
    tenant = Tenant("a", requests_per_minute=10)
    limits, _clock = make(tenant, share=0.5)
    for _ in range(5):
        admit(limits, tenant)
    with pytest.raises(TenantLimitError):
        admit(limits, tenant)


def test_salts_part_tenants_that_ask_for_it():
    own, other = Tenant("a", has_own_cache=True), Tenant("b", has_own_cache=True)
    assert tenant_salt(Tenant("c"), None) is None
    assert tenant_salt(Tenant("c"), "s") == "s"
    salts = {
        tenant_salt(t, s) for t in (own, other) for s in (None, "", "s", tenant_salt(own, None))
    }
    assert len(salts) == 8


@pytest.mark.parametrize("num_processes", [2, 3, 4, 5])
def test_processes_together_let_in_no_more_than_the_limit(num_processes: int):
    tenant = Tenant("a", requests_per_minute=5, max_queued_requests=5)
    check_parts(TenantsConfig.of(tenant), num_processes, "--api-server-count")
    num_admitted = num_waiting = 0
    for _ in range(num_processes):
        limits, _ = make(tenant, 1 / num_processes)
        waiting, _ = make(Tenant("a", max_queued_requests=5), 1 / num_processes)
        for number in range(6):
            for counted in (limits, waiting):
                try:
                    admit(counted, tenant, waiting=number if counted is waiting else 0)
                except TenantLimitError:
                    continue
                num_admitted += counted is limits
                num_waiting += counted is waiting
    assert 0 < num_admitted <= 5
    assert 0 < num_waiting <= 5


def test_a_limit_that_cannot_be_parted_is_refused():
    check_parts(None, 4, "--api-server-count")
    tenants = TenantsConfig.of(Tenant("a", requests_per_minute=4), Tenant("b", tokens_per_minute=3))
    check_parts(tenants, 3, "ingress_replicas")
    with pytest.raises(ConfigError, match="'b' has tokens_per_minute=3, and ingress_replicas=4"):
        check_parts(tenants, 4, "ingress_replicas")
