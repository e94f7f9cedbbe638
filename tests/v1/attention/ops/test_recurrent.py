"""The ops of recurrent layers against their equations in fp64, and cut anywhere, bit by bit."""

import math

import pytest
import torch

from vllm.v1.attention.ops import recurrent


def inputs(num_tokens: int, seed: int, by_channel: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads, groups, key, value = 4, 2, 8, 6

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    decays = draw(num_tokens, heads, key) if by_channel else draw(num_tokens, heads)
    return [
        draw(num_tokens, groups, key),
        draw(num_tokens, groups, key),
        draw(num_tokens, heads, value),
        -decays.abs(),
        draw(num_tokens, heads).sigmoid(),
    ]


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_scan_is_the_gated_delta_rule(by_channel: bool) -> None:
    queries, keys, values, decays, betas = inputs(20, 1, by_channel)
    state = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(2))
    expected = state.double()
    found = recurrent.gated_delta_scan(queries, keys, values, decays, betas, state)
    for token in range(20):
        for head in range(4):
            q, k = queries[token, head // 2].double(), keys[token, head // 2].double()
            q = q / (q.square().sum() + 1e-6).sqrt() / math.sqrt(8)
            k = k / (k.square().sum() + 1e-6).sqrt()
            own = expected[head]
            own *= decays[token, head].double().exp().reshape(-1, 1)
            change = betas[token, head].double() * (values[token, head].double() - own.T @ k)
            own += torch.outer(k, change)
            torch.testing.assert_close(found[token, head].double(), own.T @ q, atol=1e-5, rtol=0)
    torch.testing.assert_close(state.double(), expected, atol=1e-5, rtol=0)


def test_a_scan_cut_anywhere_has_the_same_bits() -> None:
    parts = inputs(40, 3)
    whole_state = torch.zeros(4, 8, 6)
    whole = recurrent.gated_delta_scan(*parts, whole_state)
    for cut in range(1, 40):
        state = torch.zeros(4, 8, 6)
        first = recurrent.gated_delta_scan(*(part[:cut] for part in parts), state)
        second = recurrent.gated_delta_scan(*(part[cut:] for part in parts), state)
        assert torch.equal(torch.cat([first, second]), whole)
        assert torch.equal(state, whole_state)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_the_convolution_reads_what_lies_before_a_chunk(width: int) -> None:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(30, 10, generator=generator)
    weight = torch.randn(10, width, generator=generator)
    zeros = torch.zeros(width - 1, 10)
    whole = recurrent.short_convolution(rows, zeros, weight)
    padded = torch.cat([zeros, rows]).double()
    mixed = torch.stack(
        [(padded[t : t + width] * weight.T.double()).sum(0) for t in range(len(rows))]
    )
    torch.testing.assert_close(whole.double(), mixed * mixed.sigmoid(), atol=1e-6, rtol=0)
    for cut in range(width, 30):
        left = rows[cut - width + 1 : cut]
        later = recurrent.short_convolution(rows[cut:], left, weight)
        torch.testing.assert_close(later, whole[cut:], atol=1e-6, rtol=0)


def test_decays_of_large_inputs_are_finite() -> None:
    logs = recurrent.decay_logs(
        torch.tensor([[-100.0, 0.0, 100.0]]), torch.zeros(3), torch.tensor([0.0, 1.0, 2.0])
    )
    expected = [0.0, -math.e * math.log(2), -100 * math.e**2]
    torch.testing.assert_close(logs[0], torch.tensor(expected), atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_the_gated_norm_gates_behind_the_norm(activation: str) -> None:
    x, gate = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])
    found = recurrent.gated_rms_norm(x, gate, torch.tensor([1.0, 2.0]), 0.0, activation)
    share = 1 / (1 + math.exp(-2.0))
    normed = [3.0 / math.sqrt(12.5), 2 * 4.0 / math.sqrt(12.5)]
    factors = [0.0, 2.0 * share] if activation == "silu" else [0.5, share]
    expected = torch.tensor([[n * f for n, f in zip(normed, factors, strict=True)]])
    torch.testing.assert_close(found, expected)
