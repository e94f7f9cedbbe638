"""The fast ways of the decoder's ops against their maths written out."""

import pytest
import torch

from vllm.v1.attention.ops import decoder, narrow_linear


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def softmax_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    scores = queries @ keys.mT * 0.3
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores + mask
    if sinks is not None:
        column = sinks.expand(scores.shape[:-1]).unsqueeze(-1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return weights @ values


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
@pytest.mark.parametrize("num_key_heads", [1, 3])
def test_attention_with_a_mask(soft_cap: float, num_key_heads: int) -> None:
    queries, keys, values = randn(2, 3, 5, 8), randn(2, num_key_heads, 9, 8), randn(2, 1, 9, 8)
    values = values.expand(-1, num_key_heads, -1, -1)
    mask = torch.zeros(2, 1, 5, 9).masked_fill(randn(2, 1, 5, 9) > 0.8, -torch.inf)
    mask[..., 0] = 0
    output, log_sums = decoder.attend_keys(queries, keys, values, mask, False, 0.3, soft_cap)
    expected = softmax_attention(queries, keys, values, mask, soft_cap=soft_cap)
    torch.testing.assert_close(output, expected)
    explicit = decoder.attend_explicitly(queries, keys, values, mask, False, 0.3, soft_cap)
    torch.testing.assert_close(explicit, (output, log_sums))


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
def test_causal_attention(soft_cap: float) -> None:
    queries, keys = randn(2, 3, 7, 8), randn(2, 1, 7, 8)
    ahead = torch.full((7, 7), -torch.inf).triu(1)
    output, _ = decoder.attend_keys(queries, keys, keys, None, True, 0.3, soft_cap)
    expected = softmax_attention(queries, keys, keys, ahead, soft_cap=soft_cap)
    torch.testing.assert_close(output, expected)


def test_scores_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys = randn(1, 2, 7, 8), randn(1, 1, 7, 8)
    whole = decoder.attend_explicitly(queries, keys, keys, None, True, 0.3, 0.0)
    monkeypatch.setattr(decoder, "_MAX_SCORE_VALUES", 2 * 7 * 3)
    parts = decoder.attend_explicitly(queries, keys, keys, None, True, 0.3, 0.0)
    torch.testing.assert_close(parts, whole)


def test_two_parts_join_to_the_whole_and_sinks_take_their_share() -> None:
    queries, keys = randn(2, 3, 5, 8), randn(2, 1, 9, 8)
    values, sinks = randn(2, 1, 9, 8, seed=1), randn(3, 1)
    args = (None, False, 0.3, 0.0)
    first = decoder.attend_keys(queries, keys[:, :, :4], values[:, :, :4], *args)
    second = decoder.attend_keys(queries, keys[:, :, 4:], values[:, :, 4:], *args)
    joined = decoder.join_attention(first, second)
    torch.testing.assert_close(joined, decoder.attend_keys(queries, keys, values, *args))
    weighed = decoder.weigh_sinks(*joined, sinks)
    expected = softmax_attention(queries, keys, values, torch.zeros(()), sinks)
    torch.testing.assert_close(weighed, expected)


def test_many_narrow_queries_attend_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_linear, "_HAS_TILE_UNIT", False)
    queries, keys = randn(1, 2, 40, 8).bfloat16(), randn(1, 1, 40, 8).bfloat16()
    output, _ = decoder.attend_keys(queries, keys, keys, None, True, 0.3, 0.0)
    assert output.dtype == torch.bfloat16
    wide = decoder.attend_keys(queries.float(), keys.float(), keys.float(), None, True, 0.3, 0.0)
    assert torch.equal(output, wide[0].bfloat16())


def test_norm_with_an_offset() -> None:
    x, weight = randn(4, 8), randn(8)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)
    torch.testing.assert_close(decoder.rms_norm_offset(x, weight, 1e-6), expected)


def test_rotation_turns_pairs_of_halves() -> None:
    x, angles = randn(5, 2, 8), randn(5, 1, 4)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(5, 1, 4), angles)
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(decoder.rotate_halves(x, cos, sin), expected)


def test_gates() -> None:
    x = 4 * randn(6, 10)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(decoder.silu_and_mul(x), gate * torch.sigmoid(gate) * up)
    cubic = 0.7978845608 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(decoder.gelu_tanh_and_mul(x), 0.5 * gate * (1 + cubic.tanh()) * up)
    gate, up = x[:, ::2].clamp(max=2.0), x[:, 1::2].clamp(-2.0, 2.0)
    expected = (up + 1) * gate * torch.sigmoid(1.7 * gate)
    torch.testing.assert_close(decoder.clamped_glu_and_mul(x, 1.7, 2.0), expected)


@pytest.mark.parametrize("normalises", [True, False])
def test_experts_are_weighed_sums(normalises: bool) -> None:
    x, logits, matrices = randn(6, 4), randn(6, 5), randn(5, 4, 4)
    ids, weights = decoder.choose_by_softmax(logits, 2, normalises)
    output = decoder.run_experts(x, ids, weights, lambda rows, expert: rows @ matrices[expert])
    for t in range(6):
        probabilities = torch.softmax(logits[t], -1)
        best = probabilities.argsort(descending=True)[:2]
        total = probabilities[best].sum() if normalises else 1.0
        expected = sum(probabilities[e] / total * (x[t] @ matrices[e]) for e in best)
        torch.testing.assert_close(output[t], expected)


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize("num_chosen_groups", [1, 2, 4])
def test_sigmoids_choose_within_groups(num_chosen_groups: int, normalises: bool) -> None:
    logits, bias = randn(20, 8), 2 * randn(8)
    ids, weights = decoder.choose_by_sigmoid(logits, bias, 2, 4, num_chosen_groups, normalises, 2.5)
    for t in range(20):
        scores = torch.sigmoid(logits[t])
        ranked = [(float(s + b), e) for e, (s, b) in enumerate(zip(scores, bias, strict=True))]
        groups = sorted(range(4), key=lambda g: -sum(r for r, e in ranked if e // 2 == g))
        left = [(r, e) for r, e in ranked if e // 2 in groups[:num_chosen_groups]]
        best = [e for _, e in sorted(left, reverse=True)[:2]]
        assert ids[t].tolist() == best
        total = scores[best].sum() if normalises else 1.0
        torch.testing.assert_close(weights[t], 2.5 * scores[best] / total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_fp32_products(dtype: torch.dtype) -> None:
    x, weight = randn(3, 8).to(dtype), randn(20, 8).to(dtype)
    logits = decoder.project_to_logits(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T)
