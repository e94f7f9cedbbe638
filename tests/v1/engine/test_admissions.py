"""How the last requests were admitted."""

from vllm.v1.engine.admissions import Admissions
from vllm.v1.messages import EngineCoreOutput, PrefillStats


def output(name: str, cached: int) -> EngineCoreOutput:
    return EngineCoreOutput(name, [1], prefill_stats=PrefillStats(100, cached))


def test_admissions_are_found_by_the_clients_id_and_are_bounded():
    admissions = Admissions(max_requests=2)
    admissions.note([output("cmpl-a-0-0123abcd-00000001", 64)])
    # A later step, and another prompt of the same request, tell nothing.
    admissions.note([EngineCoreOutput("cmpl-a-0-0123abcd-00000001", [2])])
    admissions.note([output("cmpl-a-1-0123abcd-00000003", 0)])
    assert admissions.find("cmpl-a") == PrefillStats(100, 64)
    assert admissions.find("cmpl-b") is None
    admissions.note([output("cmpl-b-0-0123abcd-00000004", 1), output("c-00000005", 2)])
    assert admissions.find("cmpl-a") is None
    assert admissions.find("c") == PrefillStats(100, 2)
