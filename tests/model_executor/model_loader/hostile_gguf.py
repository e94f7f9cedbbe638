"""Damage to GGUF files: what tests do a little of, and ``benchmarks.gguf_damage`` much."""

import random
import struct
from pathlib import Path

import numpy as np
import torch

from tests.native.test_library import make_context
from tests.native.test_panels import BINDER
from vllm.exceptions import CheckpointError
from vllm.model_executor.layers.quantization.gguf_blocks import BLOCK_FORMS, read_blocks
from vllm.model_executor.layers.quantization.panels import PackedRows
from vllm.native.packing import find_block_packer
from vllm.utils.gguf_file import read_gguf
from vllm.v1.attention.ops.stored import Inputs

_HOSTILE = (0, 1, 0xFF, 0x7F, 0x80)
_LARGE = (2**64 - 1, 2**63, 2**32, 2**31 - 1, 0)


def find_header_end(path: Path) -> int:
    """Returns where the first tensor's values begin."""
    return min(tensor.offset for tensor in read_gguf(path).tensors.values())


def damage_header(rng: random.Random, whole: bytes, end: int) -> bytes:
    """Returns a file with one to eight bytes, or numbers, of its header changed."""
    data = bytearray(whole)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(4, end)
        if rng.random() < 0.3 and at + 8 <= end:
            value = rng.choice([*_LARGE, rng.getrandbits(64)])
            data[at : at + 8] = struct.pack("<Q", value)
        else:
            data[at] = rng.choice(_HOSTILE) if rng.random() < 0.5 else rng.randrange(256)
    return bytes(data)


class BlockTrial:
    """Packs random blocks and multiplies by them.

    Args:
        seed: Of the blocks.
    """

    def __init__(self, seed: int) -> None:
        self._rng, self._context = np.random.default_rng(seed), make_context(1)

    def run(self, name: str, *, is_extreme: bool, inputs: Inputs) -> bool:
        """Tries three rows of a type; False: they are refused, for a number that is none."""
        blocks = self._rng.integers(0, 256, (3, 2 * BLOCK_FORMS[name].num_bytes), dtype=np.uint8)
        if is_extreme:
            extremes = np.array([0, 0x7C, 0x7F, 0x80, 0xFF], np.uint8)
            blocks[:] = self._rng.choice(extremes, blocks.shape)
        try:
            rows = read_blocks(name, torch.from_numpy(blocks), find_block_packer(1))
            packed = PackedRows(rows, name, inputs)
        except CheckpointError:
            return False
        x, output = torch.ones(2, packed.num_columns), torch.empty(2, 3)
        self._context.matmul(BINDER.rows(packed), x, output)
        # By their bits: sums of what overflows are no numbers.
        assert torch.equal(*output.view(torch.int32))
        return True
