"""What the tokens of a step change; most of it in ``test_scheduler.py``."""

from dataclasses import replace

import pytest

from tests.v1.core.sched.builders import (
    answer,
    make_request,
    make_scheduler,
    outputs_by_request,
)
from vllm.v1.outputs import DraftTokenIds


def test_logits_that_are_no_numbers_are_noted() -> None:
    scheduler = make_scheduler()
    for name in ("0", "1"):
        scheduler.add_request(make_request(name, 10))
    step = scheduler.schedule()
    result = answer(step, {"0": [5], "1": [6]})
    scheduler.update_from_output(step, replace(result, num_nans_in_logits={"0": 3}))
    assert [scheduler.requests[name].num_nans_in_logits for name in ("0", "1")] == [3, 0]


@pytest.mark.parametrize(
    ("num_invalid", "sampled", "valid", "accepted"),
    [(0, [7, 8, 9], 3, 2), (2, [7, 9], 1, 1), (2, [9], 1, 0), (3, [9], 0, 0), (4, [9], 0, 0)],
)
def test_drafts_that_only_fill_a_step_up_are_not_counted(
    num_invalid: int, sampled: list[int], valid: int, accepted: int
) -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    scheduler.add_request(make_request("0", 10))
    step = scheduler.schedule()
    scheduler.update_from_output(step, answer(step, {"0": [5]}))
    scheduler.update_draft_token_ids(DraftTokenIds(["0"], [[7, 8, 9]]))
    step = scheduler.schedule()
    step.num_invalid_spec_tokens = {"0": num_invalid}
    bundles = scheduler.update_from_output(step, answer(step, {"0": sampled}))
    output = outputs_by_request(bundles)["0"]
    assert (output.num_draft_tokens, output.num_accepted_tokens) == (valid, accepted)
    stats = bundles[0].scheduler_stats
    assert stats is not None
    counts = stats.spec_decoding_stats
    if not valid:
        assert counts is None
    else:
        assert counts is not None
        assert (counts.num_draft_tokens, counts.num_accepted_tokens) == (valid, accepted)
    # What was computed in vain is taken back, whoever made it.
    assert scheduler.requests["0"].num_computed_tokens == 10 + len(sampled)
