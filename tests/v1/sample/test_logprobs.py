"""Log probabilities against log_softmax."""

import numpy as np
import torch

from vllm.v1.sample.logprobs import gather_logprobs, gather_sampled_logprobs


def test_values_ids_and_ranks() -> None:
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([0, 3, 7, 19, 11])
    found = gather_logprobs(logits, chosen, 4)
    expected = logits.log_softmax(-1).numpy()
    for i in range(5):
        order = np.argsort(-expected[i])
        assert found.token_ids[i].tolist() == [int(chosen[i]), *order[:4].tolist()]
        np.testing.assert_array_equal(found.logprobs[i], expected[i][found.token_ids[i]])
        assert found.ranks[i] == order.tolist().index(int(chosen[i])) + 1


def test_tied_tokens_share_the_better_rank() -> None:
    found = gather_logprobs(torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([1]), 0)
    assert found.ranks.tolist() == [1]


def test_each_row_pays_for_what_it_asked() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([8, 1, 2, 3])
    lists = gather_sampled_logprobs(logits, tokens, np.array([2, -1, 9, 0]))
    expected = logits.log_softmax(-1).numpy()
    assert lists.logprobs.shape == (4, 10)
    for row, count in ((0, 2), (2, 9), (3, 0)):
        ids = lists.logprob_token_ids[row, : count + 1]
        assert ids[0] == tokens[row]
        np.testing.assert_array_equal(lists.logprobs[row, : count + 1], expected[row][ids])
        assert not lists.logprobs[row, count + 1 :].any()
    assert sorted(lists.logprob_token_ids[2, 1:].tolist()) == list(range(9))
    assert not lists.logprobs[1].any()
    assert lists.sampled_token_ranks[1] == 0


def test_rows_that_name_their_tokens() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([8, 1, 2, 3])
    named = {0: np.array([5, 3, 8]), 3: np.array([7])}
    lists = gather_sampled_logprobs(logits, tokens, np.array([3, 2, -1, 1]), named)
    expected = logits.log_softmax(-1).numpy()
    order = np.argsort(-expected[1])[:2]
    for row, ids in ((0, [8, 5, 3, 8]), (1, [1, *order.tolist()]), (3, [3, 7])):
        assert lists.logprob_token_ids[row, : len(ids)].tolist() == ids
        np.testing.assert_array_equal(lists.logprobs[row, : len(ids)], expected[row][ids])
        assert not lists.logprobs[row, len(ids) :].any()
        rank = int((expected[row] > expected[row][ids[0]]).sum()) + 1
        assert lists.sampled_token_ranks[row] == rank
    assert not lists.logprobs[2].any()
