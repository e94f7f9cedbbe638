from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest, PrefillStats
from vllm.v1.engine.parallel_sampling import ParentRequest, make_child_params


def test_children_differ_by_seed_only():
    params = SamplingParams(n=3, seed=5, temperature=0.7, stop=["x"])
    children = [make_child_params(params, i) for i in range(3)]
    assert [c.seed for c in children] == [5, 6, 7]
    assert all((c.n, c.temperature, c.stop_strings) == (1, 0.7, ["x"]) for c in children)
    assert params.n == 3


def test_seeds_stay_signed_64_bit_integers():
    params = SamplingParams(n=2, seed=2**63 - 1)
    assert make_child_params(params, 1).seed == -(2**63)
    assert make_child_params(SamplingParams(n=2), 1).seed is None


def parent_of_two(output_kind: RequestOutputKind) -> ParentRequest:
    params = SamplingParams(n=2, output_kind=output_kind)
    return ParentRequest(EngineCoreRequest("mine", [1], params, 0.0), None)


def answer(index: int, reason: str | None = None) -> CompletionOutput:
    return CompletionOutput(index, "", [], finish_reason=reason)


def test_streams_pass_answers_through():
    parent = parent_of_two(RequestOutputKind.DELTA)
    first = answer(1)
    assert parent.take_in(first) == [first]
    parent.take_in(answer(1, "stop"))
    assert not parent.finished
    parent.take_in(answer(0, "stop"))
    assert parent.finished


def test_final_answers_wait_for_each_other():
    parent = parent_of_two(RequestOutputKind.FINAL_ONLY)
    assert parent.take_in(answer(1, "stop")) == []
    assert [a.index for a in parent.take_in(answer(0, "length"))] == [0, 1]


def test_the_answer_admitted_first_tells_what_was_cached():
    parent = parent_of_two(RequestOutputKind.DELTA)
    parent.note_prefill(None)
    parent.note_prefill(PrefillStats(40, 0))
    parent.note_prefill(PrefillStats(40, 32))
    assert parent.prefill_stats == PrefillStats(40, 0)
