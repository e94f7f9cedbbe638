"""A model's file with rows of whole blocks: ``python -m benchmarks.real_weights.widened FILE OUT``.

Types of two and three bits have blocks of 256 weights, and rows of small trained models do not:
a quantiser gives most of their matrices other types. OUT is the same model in fp32 (architectures
llama and qwen2), its hidden size and the inputs of its output projections filled up with zeros to
multiples of 256: its answers are the same but for rounding, and ``llama-quantize`` takes it.

Zeros in a norm's rows change the mean of squares by a factor, which goes into its weights and the
epsilon. Heads that are added have zero queries and zero columns behind them.
"""

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_BLOCK = 256
_FAMILIES = ("llama", "qwen2")


class Widening:
    """What becomes of a model's sizes, keys and tensors.

    Args:
        reader: Of its file.
    """

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._reader = reader
        self.family = str(self._key("general.architecture"))
        if self.family not in _FAMILIES:
            raise SystemExit(f"{self.family}: only {' and '.join(_FAMILIES)} are widened")
        self.hidden = int(self._own("embedding_length"))
        self.heads = int(self._own("attention.head_count"))
        self.kv_heads = int(self._own("attention.head_count_kv"))
        self.head_dim = self.hidden // self.heads
        self.wide_hidden = -(-self.hidden // _BLOCK) * _BLOCK
        self.wide_heads = self.heads
        while self.wide_heads % self.kv_heads or self.wide_heads * self.head_dim % _BLOCK:
            self.wide_heads += 1

    def _key(self, name: str) -> Any:
        return self._reader.fields[name].contents()

    def _own(self, name: str) -> Any:
        return self._key(f"{self.family}.{name}")

    def write_keys(self, writer: gguf.GGUFWriter) -> None:
        """Write all keys, of which those of sizes are changed."""
        share = self.hidden / self.wide_hidden
        epsilon = "attention.layer_norm_rms_epsilon"
        changed = {
            f"{self.family}.embedding_length": self.wide_hidden,
            f"{self.family}.attention.head_count": self.wide_heads,
            f"{self.family}.{epsilon}": self._own(epsilon) * share,
        }
        for name, field in self._reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
                continue
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            value = changed.get(name, field.contents())
            writer.add_key_value(name, value, field.types[0], sub_type=inner)
        lengths = (f"{self.family}.attention.{part}_length" for part in ("key", "value"))
        for name in lengths:
            if name not in self._reader.fields:
                writer.add_uint32(name, self.head_dim)

    def widen(self, name: str, value: np.ndarray) -> np.ndarray:
        """Return a tensor's values, filled up."""
        part = name.split(".")[-2]
        if part.endswith("norm"):
            factor = np.float32((self.hidden / self.wide_hidden) ** 0.5)
            return self._fill(value * factor, -1, self.wide_hidden)
        if part == "attn_q":
            value = self._add_heads(value, 0)
        elif part == "attn_output":
            value = self._add_heads(value, -1)
        if part in ("attn_output", "ffn_down"):
            return self._fill(value, 0, self.wide_hidden)
        return value if value.ndim == 1 else self._fill(value, -1, self.wide_hidden)

    def _add_heads(self, value: np.ndarray, axis: int) -> np.ndarray:
        """Returns rows or columns of heads, those of each key head filled up."""
        moved = np.moveaxis(value, axis, 0)
        of_keys = moved.reshape(self.kv_heads, -1, *moved.shape[1:])
        width = self.wide_heads // self.kv_heads * self.head_dim
        wide = self._fill(of_keys, 1, width).reshape(-1, *moved.shape[1:])
        return np.moveaxis(wide, 0, axis)

    @staticmethod
    def _fill(value: np.ndarray, axis: int, size: int) -> np.ndarray:
        width = [(0, 0)] * value.ndim
        width[axis] = (0, size - value.shape[axis])
        return np.pad(value, width)


def widen_file(path: Path, out: Path) -> None:
    """Write the widened model."""
    reader = gguf.GGUFReader(path)
    widening = Widening(reader)
    writer = gguf.GGUFWriter(out, widening.family)
    widening.write_keys(writer)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        wide = widening.widen(tensor.name, values)
        writer.add_tensor(tensor.name, np.ascontiguousarray(wide, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Widen one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    widen_file(args.file, args.out)


if __name__ == "__main__":
    main()
