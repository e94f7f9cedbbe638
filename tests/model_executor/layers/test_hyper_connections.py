"""The hyper-connection modules against the formulas, one token and one value at a time."""

import math

import pytest
import torch

from vllm.distributed.parallel_state import SingleProcessGroup
from vllm.model_executor.layers.hyper_connections import HyperConnection, HyperHead
from vllm.model_executor.layers.linear import TensorFactory
from vllm.v1.attention.ops.registry import get_reference_op

MAKE = TensorFactory(torch.float32, torch.device("cpu"), SingleProcessGroup(), get_reference_op)
WIDTH, NORM_EPS, HC_EPS, ITERATIONS = 6, 1e-3, 1e-2, 5


def fill(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


def project(streams: torch.Tensor, fn: torch.Tensor) -> list[float]:
    flat = streams.flatten().double()
    return (fn.double() @ (flat / math.sqrt(flat.square().mean() + NORM_EPS))).tolist()


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_read_and_write(n: int) -> None:
    hc = HyperConnection(n, WIDTH, NORM_EPS, HC_EPS, ITERATIONS, get_reference_op, MAKE)
    fill(hc, n)
    streams = torch.randn(3, n, WIDTH, generator=torch.Generator().manual_seed(9))
    output = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10))
    collapsed, post, mix = hc.read(streams)
    written = hc.write(output, streams, post, mix)
    base, scale = hc.base.tolist(), hc.scale.tolist()
    for t in range(3):
        m = project(streams[t], hc.fn)
        pre = [sigmoid(m[i] * scale[0] + base[i]) + HC_EPS for i in range(n)]
        gain = [2 * sigmoid(m[n + i] * scale[1] + base[n + i]) for i in range(n)]
        rest = range(2 * n, 2 * n + n * n)
        matrix = torch.tensor([m[k] * scale[2] + base[k] for k in rest], dtype=torch.float64)
        matrix = matrix.view(n, n).softmax(1) + HC_EPS
        matrix = matrix / (matrix.sum(0, keepdim=True) + HC_EPS)
        for _ in range(ITERATIONS - 1):
            matrix = matrix / (matrix.sum(1, keepdim=True) + HC_EPS)
            matrix = matrix / (matrix.sum(0, keepdim=True) + HC_EPS)
        expected = sum(pre[i] * streams[t, i] for i in range(n))
        torch.testing.assert_close(collapsed[t], expected)
        for j in range(n):
            stream = gain[j] * output[t]
            for i in range(n):
                stream = stream + matrix[i, j].item() * streams[t, i]
            torch.testing.assert_close(written[t, j], stream)


def test_head() -> None:
    head = HyperHead(4, WIDTH, NORM_EPS, HC_EPS, get_reference_op, MAKE)
    fill(head, 5)
    streams = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(9))
    collapsed = head(streams)
    for t in range(2):
        m = project(streams[t], head.fn)
        weights = [
            sigmoid(m[i] * head.scale.item() + head.base[i].item()) + HC_EPS for i in range(4)
        ]
        expected = sum(weights[i] * streams[t, i] for i in range(4))
        torch.testing.assert_close(collapsed[t], expected)


def test_slots_carry_the_published_leaves() -> None:
    hc = HyperConnection(2, WIDTH, NORM_EPS, HC_EPS, ITERATIONS, get_reference_op, MAKE)
    slots = hc.weight_slots("layers.0.hc_attn")
    assert {name: tuple(slot.shape) for name, slot in slots.items()} == {
        "layers.0.hc_attn_fn": (8, 12),
        "layers.0.hc_attn_base": (8,),
        "layers.0.hc_attn_scale": (3,),
    }
