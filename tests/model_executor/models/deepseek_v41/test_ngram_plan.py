"""Rows of the tables: the release's heights, and the numbers that its n-grams are hashed by."""

from tests.model_executor.models.deepseek_v41.reference import prime_after
from tests.model_executor.models.deepseek_v41.release import RELEASE
from vllm.model_executor.models.deepseek_v41.config import DeepseekV41Config
from vllm.model_executor.models.deepseek_v41.ngram_plan import NgramPlan


def test_the_release() -> None:
    plan = DeepseekV41Config.from_dict(RELEASE).ngrams
    assert plan is not None
    assert [plan.count_rows(table) for table in range(2)] == [384_006_168, 384_016_682]
    assert plan.find_primes(0)[:2] == (16_000_057, 16_000_079)
    assert plan.find_primes(1)[0] > plan.find_primes(0)[-1]
    assert plan.find_multipliers(0) == (
        *(76632096046245, 4839876093313, 35959672319349, 73987337458391),
    )
    assert plan.find_multipliers(1) == (
        *(67716810739261, 51510806800915, 30921347202721, 82619226485591),
    )


def test_heads_have_primes_of_their_own_in_order() -> None:
    plan = NgramPlan((0, 3), 3, 2, 8, least_rows=2, pad_token_id=0, num_folded=9)
    found = [*plan.find_primes(0), *plan.find_primes(1)]
    assert found == [2, 3, 5, 7, 11, 13, 17, 19]
    assert plan.find_offsets(1) == (0, 11, 24, 41)
    # Composites that fool a test of one base.
    large = NgramPlan((0,), 2, 3, 8, least_rows=3_215_031_751, pad_token_id=0, num_folded=9)
    assert large.find_primes(0)[0] == prime_after(3_215_031_751)
