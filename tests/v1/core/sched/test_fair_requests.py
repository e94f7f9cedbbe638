"""A scheduler of several tenants: who is admitted, whose prompt goes on, who gives way."""

from collections import Counter

from tests.v1.core.sched.builders import answer, make_request, make_scheduler
from vllm.config.tenants import (
    BATCH_TENANT,
    Tenant,
    TenantsConfig,
    TokenWeights,
    with_batch_tenant,
)
from vllm.v1.core.sched.fair_requests import FairRequests
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

EQUAL = TenantsConfig.of(Tenant("a"), Tenant("b"), token_weights=TokenWeights(1, 0.1, 1))


def make(tenants: TenantsConfig = EQUAL, **fields: object) -> Scheduler:
    fields = {"max_num_batched_tokens": 64, "max_num_seqs": 8, **fields}
    return make_scheduler(tenants=tenants, max_model_len=2048, **fields)


def add(scheduler: Scheduler, request_id: str, num_tokens: int = 32, max_tokens: int = 1) -> None:
    """Add a request with a prompt of its own; its first letter is its tenant."""
    first = hash(tuple(request_id.encode())) % (1 << 40)  # of ints: the same in every process
    prompt = range(first, first + num_tokens)
    request = make_request(request_id, prompt, max_tokens, tenant=request_id[0])
    scheduler.add_request(request)


def step(scheduler: Scheduler) -> SchedulerOutput:
    """Run a step in which every complete prompt and decode brings a token."""
    output = scheduler.schedule()
    done = {
        name: [7]
        for name in output.num_scheduled_tokens
        if not scheduler.requests[name].is_prefill_chunk
    }
    scheduler.update_from_output(output, answer(output, done))
    return output


def test_a_flood_does_not_stand_in_the_way():
    scheduler = make()
    for number in range(50):
        add(scheduler, f"a{number}")
    step(scheduler)
    add(scheduler, "b0")
    assert set(step(scheduler).num_scheduled_tokens) >= {"b0"}


def test_shares_follow_weights_whoever_asks_more():
    weighted = TenantsConfig.of(Tenant("a", 3), Tenant("b"), token_weights=EQUAL.token_weights)
    scheduler = make(weighted)
    served: Counter[str] = Counter()
    for number in range(100):
        for _ in range(5):
            add(scheduler, f"b{number}-{_}", 24)
        add(scheduler, f"a{number}-0", 40)
        add(scheduler, f"a{number}-1", 40)
        for name, count in step(scheduler).num_scheduled_tokens.items():
            served[name[0]] += count
    assert abs(served["a"] / sum(served.values()) - 0.75) < 0.02


def test_nothing_is_left_idle():
    scheduler = make()
    for number in range(10):
        add(scheduler, f"a{number}")
    assert step(scheduler).total_num_scheduled_tokens == 64


def test_a_long_prompt_goes_on_with_what_others_leave():
    scheduler = make()
    add(scheduler, "a-long", 1000)
    assert step(scheduler).num_scheduled_tokens == {"a-long": 64}
    add(scheduler, "b0", 40)
    add(scheduler, "a-late", 16)
    # b was served less: its prompt first, then the rest for the prompt that began, none for a later
    # one of the same tenant.
    assert step(scheduler).num_scheduled_tokens == {"b0": 40, "a-long": 24}
    # A prompt that began goes before those of its own tenant.
    assert "a-late" not in step(scheduler).num_scheduled_tokens


def test_answers_go_before_prompts():
    scheduler = make()
    add(scheduler, "a0", 32, max_tokens=50)
    step(scheduler)
    add(scheduler, "b0", 200)
    output = step(scheduler)
    assert output.num_scheduled_tokens == {"a0": 1, "b0": 63}


def test_answers_are_charged():
    scheduler = make()
    add(scheduler, "a0", 10, max_tokens=5)
    requests = scheduler._requests
    assert isinstance(requests, FairRequests)
    for _ in range(5):
        step(scheduler)
    assert not scheduler.requests
    assert requests.shares.counter("a") == 10 + 5
    assert not requests._num_charged


def test_the_tenant_that_was_served_most_gives_way():
    # 16 blocks of 16 tokens: two prompts of 112 tokens fit, until answers grow.
    scheduler = make(num_blocks=17, max_num_batched_tokens=256, scheduler_reserve_full_isl=False)
    add(scheduler, "b0", 112, max_tokens=60)
    add(scheduler, "a0", 60, max_tokens=60)
    add(scheduler, "a1", 60, max_tokens=60)
    preempted: set[str] = set()
    for _ in range(200):
        output = step(scheduler)
        preempted |= output.preempted_req_ids or set()
        if not scheduler.has_unfinished_requests():
            break
    assert not scheduler.has_unfinished_requests()
    assert preempted
    assert preempted <= {"a0", "a1"}


def test_long_answers_do_not_keep_every_place():
    """A place goes to who was served less, as long as places do not become fewer than its own."""
    scheduler = make(max_num_seqs=4)
    for number in range(6):
        add(scheduler, f"a{number}", 16, max_tokens=400)
    step(scheduler)
    add(scheduler, "b0", 16, max_tokens=200)
    output = step(scheduler)
    assert "b0" in output.num_scheduled_tokens
    assert output.preempted_req_ids == {"a3"}
    add(scheduler, "b1", 16, max_tokens=200)
    add(scheduler, "b2", 16, max_tokens=200)
    displaced = [step(scheduler).preempted_req_ids or set() for _ in range(50)]
    assert sum(map(len, displaced)) == 1
    assert Counter(request.request_id[0] for request in scheduler.running) == {"a": 2, "b": 2}


def test_a_later_class_gives_every_place_to_an_earlier_one():
    tenants = TenantsConfig.of(Tenant("a", priority=5), Tenant("b"), token_weights=TokenWeights())
    scheduler = make(tenants, max_num_seqs=4)
    for number in range(6):
        add(scheduler, f"a{number}", 16, max_tokens=400)
    step(scheduler)
    for number in range(4):
        add(scheduler, f"b{number}", 16, max_tokens=30)
    for _ in range(6):
        step(scheduler)
    assert Counter(request.request_id[0] for request in scheduler.running) == {"b": 4}
    for _ in range(40):
        step(scheduler)
    # They are done: the others go on.
    assert Counter(request.request_id[0] for request in scheduler.running) == {"a": 4}


def test_batches_get_little_of_a_step_beside_others_and_nothing_beside_prompts():
    scheduler = make(with_batch_tenant(None), max_num_batched_tokens=1024)

    def add_as(tenant: str, request_id: str, num_tokens: int, max_tokens: int) -> None:
        first = hash(tuple(request_id.encode())) % (1 << 40)
        prompt = range(first, first + num_tokens)
        request = make_request(request_id, prompt, max_tokens, tenant=tenant)
        scheduler.add_request(request)

    add_as(BATCH_TENANT, "line0", 1500, 1)
    # Alone it has whole steps.
    assert step(scheduler).num_scheduled_tokens == {"line0": 1024}
    add_as("default", "chat", 1200, 40)
    assert step(scheduler).num_scheduled_tokens == {"chat": 1024}
    assert step(scheduler).num_scheduled_tokens == {"chat": 176}
    assert step(scheduler).num_scheduled_tokens == {"chat": 1, "line0": 128}
    add_as(BATCH_TENANT, "line1", 1500, 1)
    taken = [step(scheduler).num_scheduled_tokens for _ in range(6)]
    assert all(sum(one.values()) <= 129 for one in taken)
    assert sum(one.get("line0", 0) for one in taken) == 1500 - 1024 - 128
    # When nobody has come for a while, whole steps again.
    for _ in range(40):
        step(scheduler)
    assert "chat" not in scheduler.requests
    add_as(BATCH_TENANT, "line2", 300, 1)
    taken = [step(scheduler).num_scheduled_tokens for _ in range(3)]
    assert max(sum(one.values()) for one in taken) <= 128
    for _ in range(100):
        step(scheduler)
    add_as(BATCH_TENANT, "line3", 1500, 1)
    assert step(scheduler).num_scheduled_tokens == {"line3": 1024}


def test_without_tenants_nothing_of_it_is_built():
    scheduler = make_scheduler()
    assert type(scheduler._requests).__name__ == "Requests"
    assert scheduler._requests.order_running() == ()


def test_deferred_prompts_give_way_where_nobody_gets_on():
    """Two prompts hold all blocks between them, and one who goes before them finds none."""
    scheduler = make(
        num_blocks=17, long_prefill_token_threshold=32, scheduler_reserve_full_isl=False
    )
    add(scheduler, "a0", 200)
    add(scheduler, "a1", 200)
    for _ in range(4):
        assert step(scheduler).num_scheduled_tokens == {"a0": 32, "a1": 32}
    add(scheduler, "b0", 40)
    for _ in range(40):
        step(scheduler)
    assert not scheduler.has_unfinished_requests()


def test_answers_go_on_when_a_deferred_prompt_gives_way():
    scheduler = make(
        TenantsConfig.of(Tenant("a", priority=1), Tenant("b")),
        num_blocks=17,
        max_num_batched_tokens=128,
        long_prefill_token_threshold=16,
        scheduler_reserve_full_isl=False,
    )
    add(scheduler, "a-long", 230)
    for _ in range(10):
        step(scheduler)
    for number in range(4):
        add(scheduler, f"b{number}", 16, max_tokens=40)
    has_given_way = False
    for number in range(100):
        if number < 40:
            add(scheduler, f"b-late-{number}", 16)
        output = scheduler.schedule()
        has_given_way |= "a-long" in (output.preempted_req_ids or ())
        decodes = set(scheduler.running) - scheduler._requests.prefilling
        assert {r.request_id for r in decodes} <= set(output.num_scheduled_tokens)
        done = {
            name: [7]
            for name in output.num_scheduled_tokens
            if not scheduler.requests[name].is_prefill_chunk
        }
        scheduler.update_from_output(output, answer(output, done))
    assert has_given_way
