"""Each op against slow, independent maths in float64 loops."""

import math

import pytest
import torch

from vllm.exceptions import ConfigError
from vllm.v1.attention.ops import reference
from vllm.v1.attention.ops.registry import REFERENCE_OPS, get_reference_op


@pytest.fixture
def rand() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 8, 9])
@pytest.mark.parametrize("out_size", [3, 64, 80])
def test_linear(rand: torch.Generator, num_rows: int, out_size: int) -> None:
    x, weight = randn(rand, num_rows, 10), randn(rand, out_size, 10)
    mapped = reference.linear(x, weight)
    assert mapped.is_contiguous()
    torch.testing.assert_close(mapped, x @ weight.T)


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_products_by_columns(rand: torch.Generator, num_rows: int) -> None:
    x, weight = randn(rand, num_rows, 10), randn(rand, 80, 10)
    torch.testing.assert_close(reference.linear_by_columns(x, weight), x @ weight.T)
    row, weights = randn(rand, 1, 4, 6), randn(rand, 4, 5, 6)
    torch.testing.assert_close(
        reference.grouped_linear_by_columns(row, weights),
        torch.einsum("tgi,goi->tgo", row, weights),
    )


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_grouped_linear(rand: torch.Generator, num_rows: int) -> None:
    x, weight = randn(rand, num_rows, 4, 6), randn(rand, 4, 5, 6)
    expected = torch.einsum("tgi,goi->tgo", x, weight)
    torch.testing.assert_close(reference.grouped_linear(x, weight), expected)


def test_rms_norm(rand: torch.Generator) -> None:
    x, weight = randn(rand, 3, 2, 8), randn(rand, 8)
    expected = x / (x.double().square().mean(-1, keepdim=True) + 1e-2).sqrt()
    torch.testing.assert_close(reference.rms_norm(x, None, 1e-2), expected.float())
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-2), (expected * weight).float())
    assert reference.rms_norm(x.bfloat16(), weight, 1e-2).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate_turns_the_last_pairs_and_back(rand: torch.Generator, dtype: torch.dtype) -> None:
    x = randn(rand, 3, 2, 10).to(dtype)
    angles = torch.tensor([[0.0, 0.0], [0.3, 2.0], [5.0, -1.0]])
    turns = torch.polar(torch.ones(3, 1, 2), angles[:, None])
    turned = reference.rotate_(x.clone(), turns)
    assert torch.equal(turned[..., :6], x[..., :6])
    for t in range(3):
        for pair in range(2):
            a, b = x[t, 1, 6 + 2 * pair].item(), x[t, 1, 7 + 2 * pair].item()
            c, s = math.cos(angles[t, pair]), math.sin(angles[t, pair])
            got = turned[t, 1, 6 + 2 * pair : 8 + 2 * pair].tolist()
            assert got == pytest.approx([a * c - b * s, a * s + b * c], rel=0.01, abs=0.02)
    back = reference.rotate_(turned, turns.conj().resolve_conj())
    torch.testing.assert_close(back, x, atol=1e-6 if dtype == torch.float32 else 0.05, rtol=0)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_sinkhorn(rand: torch.Generator, n: int) -> None:
    logits = randn(rand, 5, n, n) * 3
    eps = 1e-2
    expected = torch.softmax(logits.double(), -1) + eps
    expected = expected / (expected.sum(1, keepdim=True) + eps)
    for _ in range(6):
        expected = expected / (expected.sum(2, keepdim=True) + eps)
        expected = expected / (expected.sum(1, keepdim=True) + eps)
    before = logits.clone()
    result = reference.sinkhorn(logits, 7, eps, *reference.sinkhorn_sums(n, eps))
    torch.testing.assert_close(result, expected.float())
    assert torch.equal(logits, before)


def test_hyper_connection_sums(rand: torch.Generator) -> None:
    streams, out = randn(rand, 3, 4, 6), randn(rand, 3, 6)
    post, mix = randn(rand, 3, 4), randn(rand, 3, 4, 4)
    expected = post[:, :, None] * out[:, None] + torch.einsum("tij,tid->tjd", mix, streams)
    torch.testing.assert_close(reference.hc_expand(out, streams, post, mix), expected)
    expected = torch.einsum("ti,tid->td", post, streams)
    torch.testing.assert_close(reference.hc_collapse(streams, post), expected)
    fn, scale, base = randn(rand, 7, 24), randn(rand, 7), randn(rand, 7)
    flat = streams.flatten(1).double()
    normed = flat / (flat.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    expected = (normed @ fn.double().T) * scale + base
    got = reference.hc_project(streams, fn, scale, base, 1e-3)
    torch.testing.assert_close(got, expected.float())


@pytest.mark.parametrize("gap", [0, 6, 5], ids=["plain", "packed", "odd stride"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_pages(rand: torch.Generator, gap: int, dtype: torch.dtype) -> None:
    pool = torch.full((5, 4 * 3 + gap), float("nan"), dtype=dtype)
    cache = pool[:, gap // 2 : gap // 2 + 12].view(5, 4, 3)
    blocks, rows = torch.tensor([3, 1, 4]), torch.tensor([0, 3, 2])
    values = randn(rand, 3, 3)
    reference.write_rows(cache, blocks, rows, values)
    assert int(pool.isfinite().sum()) == 9
    for index in range(3):
        assert torch.equal(cache[blocks[index], rows[index]], values[index].to(dtype))
    order = torch.tensor([[2, 0], [1, 1]])
    read = reference.read_rows(cache, blocks[order], rows[order], torch.float32)
    assert torch.equal(read, values.to(dtype).float()[order])
    assert torch.equal(reference.round_rows(cache, values), values.to(dtype).float())


@pytest.mark.parametrize("has_overlap", [False, True])
def test_compress_windows(rand: torch.Generator, has_overlap: bool) -> None:
    d, ratio, num = 3, 4, 2
    width = 2 * d if has_overlap else d
    rows = randn(rand, num, ratio, 2 * width)
    previous = randn(rand, num, ratio, 2 * width) if has_overlap else None
    no_previous = torch.tensor([True, False])[:, None, None] if has_overlap else None
    result = reference.compress_windows(rows, previous, no_previous)
    for index in range(num):
        for channel in range(d):
            own = channel + (d if has_overlap else 0)
            pairs = [(row[own].item(), row[width + own].item()) for row in rows[index]]
            if previous is not None and index == 1:
                pairs += [(r[channel].item(), r[width + channel].item()) for r in previous[index]]
            total = sum(math.exp(score) for _, score in pairs)
            expected = sum(value * math.exp(score) / total for value, score in pairs)
            assert result[index, channel].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("max_values", [1 << 24, 1])
def test_index_scores(
    rand: torch.Generator, max_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_MAX_SCORE_VALUES", max_values)
    queries, keys, weights = randn(rand, 2, 3, 4, 5), randn(rand, 2, 6, 5), randn(rand, 2, 3, 4)
    products = torch.einsum("bqhd,bkd->bqhk", queries, keys).relu()
    expected = torch.einsum("bqh,bqhk->bqk", weights, products)
    torch.testing.assert_close(reference.index_scores(queries, keys, weights), expected)


def test_select_entries_breaks_ties_by_age() -> None:
    inf = float("-inf")
    scores = torch.tensor(
        [
            [0.0, 5.0, 0.0, 7.0, 0.0],
            [1.0, 1.0, 1.0, 1.0, 1.0],
            [3.0, inf, inf, inf, inf],
            [inf, inf, inf, inf, inf],
            [-2.0, -1.0, 0.0, -1.0, -1.0],
        ]
    )
    chosen = [row.nonzero().flatten().tolist() for row in reference.select_entries(scores, 3)]
    assert chosen == [[0, 1, 3], [0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 2, 3]]


def test_select_entries_against_sorting(rand: torch.Generator) -> None:
    # Few distinct values, so that ties are the rule.
    scores = torch.randint(-3, 3, (50, 40), generator=rand).float()
    for count in (1, 7, 39, 40):
        chosen = reference.select_entries(scores, count)
        for row, picked in zip(scores.tolist(), chosen, strict=True):
            best = sorted(range(40), key=lambda k: (-row[k], k))[:count]
            assert picked.nonzero().flatten().tolist() == sorted(best)


@pytest.mark.parametrize("max_values", [1 << 24, 1])
@pytest.mark.parametrize("masked", [0, 3])
def test_attend(
    rand: torch.Generator, max_values: int, masked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_MAX_SCORE_VALUES", max_values)
    queries, keys, sinks = randn(rand, 2, 3, 4, 5), randn(rand, 2, 7, 5), randn(rand, 4)
    keys[:, 0] = 0
    mask = None
    hidden = torch.zeros(2, 3, 1, 7, dtype=torch.bool)
    if masked:
        hidden[..., -masked:] = torch.rand(2, 3, 1, masked, generator=rand) < 0.5
        mask = torch.zeros(2, 3, 1, masked).masked_fill(hidden[..., -masked:], float("-inf"))
    scores = torch.einsum("bqhd,bkd->bqhk", queries, keys).masked_fill(hidden, float("-inf"))
    scores = scores[..., 1:].exp()
    total = scores.sum(-1, keepdim=True) + sinks[:, None].exp()
    expected = torch.einsum("bqhk,bkd->bqhd", scores / total, keys[:, 1:])
    torch.testing.assert_close(reference.attend(queries, keys, mask, sinks), expected)


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("repeated", [False, True])
def test_mix_experts(rand: torch.Generator, num_tokens: int, repeated: bool) -> None:
    num_experts, inner, hidden, limit = 5, 70, 66, 1.0
    x = randn(rand, num_tokens, hidden)
    gate_up = randn(rand, num_experts + 1, 2 * inner, hidden) * 0.2
    down = randn(rand, num_experts + 1, hidden, inner) * 0.2
    ids = torch.rand(num_tokens, num_experts, generator=rand).argsort(-1)[:, :2]
    if repeated:
        # A hash table may name one expert twice.
        ids[:, 1] = ids[:, 0]
    weights = torch.rand(num_tokens, 2, generator=rand)
    expected = torch.zeros_like(x)
    for token in range(num_tokens):
        pairs = [*zip(ids[token].tolist(), weights[token].tolist(), strict=True), (num_experts, 1)]
        for expert, weight in pairs:
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            gate = gate.clamp(max=limit)
            act = gate * torch.sigmoid(gate) * up.clamp(-limit, limit)
            expected[token] += weight * (down[expert] @ act)
    got = reference.mix_experts(x, gate_up, down, ids, weights, limit)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_router(rand: torch.Generator) -> None:
    logits, bias = randn(rand, 4, 6), randn(rand, 6)
    scores = reference.router_scores(logits)
    torch.testing.assert_close(scores, (1 + logits.double().exp()).log().sqrt().float())
    ids = reference.choose_experts(scores, bias, 2)
    for row, chosen in zip((scores + bias).tolist(), ids.tolist(), strict=True):
        assert sorted(chosen) == sorted(sorted(range(6), key=lambda e: -row[e])[:2])
    weights = reference.expert_weights(scores, ids, 1.5)
    torch.testing.assert_close(weights.sum(-1), torch.full((4,), 1.5))
    torch.testing.assert_close(
        weights[:, 0] / weights[:, 1],
        scores[0:4].gather(1, ids)[:, 0] / scores.gather(1, ids)[:, 1],
    )


def test_names() -> None:
    assert get_reference_op("attend") is reference.attend
    assert all(op.__name__ == name for name, op in REFERENCE_OPS.items())
    with pytest.raises(ConfigError, match=r"'flash'.*attend"):
        get_reference_op("flash")
