"""What a block of a GGUF type is, and what readers of several types share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm.model_executor.layers.quantization.decode import view_as
from vllm.model_executor.layers.quantization.panels import GroupValues
from vllm.v1.attention.ops.stored import CodeKind

ReadCodes = Callable[[torch.Tensor], torch.Tensor]
ReadNumbers = Callable[[torch.Tensor], tuple[GroupValues, GroupValues | None]]


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What a type's blocks are.

    Attributes:
        num_bytes: Of a block.
        num_codes: Of a block.
        kind: What the codes are.
        group: Codes under one scale.
        read_codes: Blocks uint8 [R, B, num_bytes] -> codes uint8 [R, columns]; of other kinds
            than int8 and int6 words, int32.
        read_numbers: Such blocks -> scales, and offsets or None.
        is_moved: Whether the native library moves such blocks into panels.
    """

    num_bytes: int
    num_codes: int
    kind: CodeKind
    group: int
    read_codes: ReadCodes
    read_numbers: ReadNumbers
    is_moved: bool = True

    def count_columns(self, row_bytes: int) -> int:
        """Return how many codes a row of so many bytes holds."""
        return row_bytes // self.num_bytes * self.num_codes


def read_halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the fp16 numbers [R, B] at a place of each block."""
    return view_as(blocks[..., at : at + 2], torch.float16)[..., 0]


def split_nibbles(stored: torch.Tensor) -> torch.Tensor:
    """Return codes [..., 2n] of bytes [..., n]: all low nibbles, then all high ones."""
    return torch.cat([stored & 15, stored >> 4], -1)


def scale_alone(at: int) -> ReadNumbers:
    """Return what reads one fp16 scale, so many bytes into each block."""

    def read(blocks: torch.Tensor) -> tuple[GroupValues, None]:
        return GroupValues(read_halves(blocks, at)), None

    return read
