"""Ops of recurrent layers, in plain torch; names are listed in ``registry``.

Everything is fp32 and in one order per token, the recurrent one, for prefill, decode and behind
hits alike: nothing is computed by chunks, so a state may be taken or resumed after any token. Of
several requests each is computed by itself.
"""

import torch
from torch.nn.functional import silu, softplus

_L2_EPS = 1e-6


def short_convolution(rows: torch.Tensor, left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns silu of a ``causal_convolution``."""
    return silu(causal_convolution(rows, left, weight))


def causal_convolution(
    rows: torch.Tensor, left: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Returns a causal convolution of every channel by itself.

    Args:
        rows: fp32 [T, C], of one request.
        left: fp32 [W - 1, C], the rows before them; zeros before the first token.
        weight: fp32 [C, W], the oldest row's first.
    """
    num_rows, width = len(rows), weight.shape[1]
    joined = torch.cat([left, rows])
    mixed = joined[:num_rows] * weight[:, 0]
    for column in range(1, width):
        mixed.addcmul_(joined[column : column + num_rows], weight[:, column])
    return mixed


def decay_logs(inputs: torch.Tensor, bias: torch.Tensor, a_log: torch.Tensor) -> torch.Tensor:
    """Returns the logarithms of a gated delta rule's decays, -exp(a_log) * softplus(inputs + bias).

    Args:
        inputs: [T, H], or [T, H, K] where each key channel decays by itself.
        bias: fp32 [H], or [H, K].
        a_log: fp32 [H], or [H, 1].
    """
    return softplus(inputs.float() + bias).mul_(-a_log.exp())


def bounded_decay_logs(
    inputs: torch.Tensor, bias: torch.Tensor, a_log: torch.Tensor, bound: float
) -> torch.Tensor:
    """Returns logarithms of decays within a bound, -bound * sigmoid(exp(a_log) * (inputs + bias)).

    Args:
        inputs, bias, a_log: As of ``decay_logs``.
        bound: The most that one falls to below zero.
    """
    return ((inputs.float() + bias) * a_log.exp()).sigmoid_().mul_(-bound)


def gated_delta_scan(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Takes a state S [K, V] per head through the tokens of one request.

    S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q, with k and q of unit length
    and q / sqrt(K). Source: arXiv:2412.06464.

    Args:
        queries, keys: fp32 [T, G, K]; H / G adjacent heads share one of each.
        values: fp32 [T, H, V].
        decays: fp32 [T, H], or [T, H, K] where each key channel decays by itself: logarithms.
        betas: fp32 [T, H].
        state: fp32 [H, K, V].

    Returns:
        fp32 [T, H, V].

    Mutates:
        state.
    """
    num_heads = values.shape[1]
    repeats = num_heads // keys.shape[1]
    queries = _unit_length(queries).mul_(keys.shape[2] ** -0.5).repeat_interleave(repeats, 1)
    keys = _unit_length(keys).repeat_interleave(repeats, 1)
    factors = decays.exp()
    factors = factors.view(*factors.shape[:2], -1, 1)
    outputs = torch.empty_like(values)
    for token in range(len(values)):
        state.mul_(factors[token])
        read = torch.bmm(keys[token].unsqueeze(1), state).squeeze(1)
        change = (values[token] - read).mul_(betas[token].unsqueeze(1))
        state.baddbmm_(keys[token].unsqueeze(2), change.unsqueeze(1))
        outputs[token] = torch.bmm(queries[token].unsqueeze(1), state).squeeze(1)
    return outputs


def _unit_length(rows: torch.Tensor) -> torch.Tensor:
    squares = rows.square().sum(-1, keepdim=True)
    return rows * squares.add_(_L2_EPS).rsqrt_()


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str
) -> torch.Tensor:
    """Scales the last axis to unit root mean square, then by ``weight`` and the activated gate.

    Args:
        x: [..., V].
        gate: The same shape.
        weight: [V].
        eps: Added to the mean square.
        activation: "silu" or "sigmoid".
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    gates = gate.float()
    factor = silu(gates) if activation == "silu" else gates.sigmoid()
    return (normed * weight.float()).mul_(factor).to(x.dtype)


def gate_heads(attended: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Returns attention's output [T, H, d] times the sigmoid of its gates [T, H, d]."""
    return attended * gates.sigmoid()
