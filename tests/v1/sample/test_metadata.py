"""Layout of a batch's sampling parameters."""

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import RowSampling, SamplingMetadata, count_logprobs


def build(*params: SamplingParams, vocab_size: int = 100) -> SamplingMetadata:
    rows = [RowSampling(p, key, 10) for key, p in enumerate(params)]
    return SamplingMetadata.build(rows, vocab_size, "cpu")


def test_greedy_batch_needs_nothing() -> None:
    metadata = build(SamplingParams(temperature=0), SamplingParams(temperature=0))
    assert metadata == SamplingMetadata(2, None, None, None)


def test_filters_list_only_the_rows_that_use_them() -> None:
    metadata = build(
        SamplingParams(temperature=0),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.5, min_p=0.25),
        SamplingParams(top_k=100),  # the whole vocabulary: no filter
    )
    random = metadata.random
    assert random is not None
    assert random.rows is not None
    assert random.rows.tolist() == random.rows_host.tolist() == [1, 2, 3]
    assert random.rng_keys.tolist() == [1, 2, 3]
    assert random.top_k is not None
    assert (random.top_k.rows.tolist(), random.top_k.values.tolist()) == ([0], [5])
    assert random.top_p is not None
    assert random.top_p.rows.tolist() == [1]
    assert random.min_p is not None
    assert random.min_p.values.tolist() == [0.25]


def test_a_top_k_beyond_all_integers_of_an_array_filters_nothing() -> None:
    random = build(SamplingParams(top_k=10**30), SamplingParams(top_k=7)).random
    assert random is not None
    assert random.settings.top_k.tolist() == [100, 7]
    assert random.top_k is not None
    assert random.top_k.rows is not None
    assert random.top_k.rows.tolist() == [1]


def test_all_rows_need_no_index() -> None:
    random = build(SamplingParams(top_k=3), SamplingParams(top_k=-1, top_p=0.5)).random
    assert random is not None
    assert random.rows is None
    assert random.min_p is None


def test_min_tokens_forbids_eos_and_stop_ids() -> None:
    with_eos = SamplingParams(min_tokens=3, stop_token_ids=[7, 500])
    with_eos.update_from_generation_config({}, 2)
    ignoring = SamplingParams(min_tokens=2, ignore_eos=True, stop_token_ids=[9])
    ignoring.update_from_generation_config({}, 2)
    stops = build(SamplingParams(), with_eos, ignoring).forbidden_stops
    assert stops is not None
    entries = set(zip(stops.rows.tolist(), stops.token_ids.tolist(), stops.until, strict=True))
    assert entries == {(1, 2, 13), (1, 7, 13), (2, 9, 12)}  # 500 is outside the vocabulary
    early, late = (stops.find(np.full(3, at), torch.device("cpu")) for at in (12, 13))
    assert early is not None
    assert list(zip(early.rows.tolist(), early.ids.tolist(), strict=True)) == [(1, 2), (1, 7)]
    assert late is None


def test_logprob_counts() -> None:
    metadata = build(SamplingParams(logprobs=0), SamplingParams(), SamplingParams(logprobs=-1))
    np.testing.assert_array_equal(metadata.num_logprobs, [0, -1, 100])
    assert count_logprobs(5000, 100) == 100
