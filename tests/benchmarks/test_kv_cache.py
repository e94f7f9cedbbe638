"""The cache benchmark measures every phase of both managers."""

import pytest

from benchmarks.kv_cache import Case, contract_case, measure, measure_steps, unit_case
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

PHASES = {
    "hash",
    "lookup_miss",
    "allocate",
    "commit",
    "decode_64",
    "decode_64_later",
    "free",
    "lookup_hit",
}


@pytest.mark.parametrize("case", [contract_case(3000, "auto"), unit_case(3000, 64, 4096)])
def test_every_phase_is_measured(case: Case) -> None:
    init_none_hash(sha256)
    values = measure(case, repeats=2, prompt_len=600)
    assert set(values) == PHASES
    assert all(0 < sample["p10"] <= sample["p90"] for sample in values.values())


@pytest.mark.parametrize("case", [contract_case(3000, 0), unit_case(3000, 32, "auto")])
def test_steps_are_measured_by_their_tokens(case: Case) -> None:
    init_none_hash(sha256)
    values = measure_steps(case, context=512, repeats=1)
    assert set(values) == {"512 tokens", "2048 tokens", "64 x 1 token"}
    assert all(us > 0 for us in values.values())
