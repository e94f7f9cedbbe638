"""The codebooks of GGUF's i-quants are the published ones."""

import hashlib

import gguf
import numpy as np
import pytest
import torch

from vllm.model_executor.layers.quantization.gguf_grids import grid_digits, grid_values

# Of the values as int16, entry by entry.
DIGESTS = {
    "IQ2_XXS": "db2a06db91388837",
    "IQ2_XS": "e2ac1035662d7dae",
    "IQ2_S": "1892dfb5cdcadaee",
    "IQ3_XXS": "2846d651a9695c11",
    "IQ3_S": "5f5cdb5f20f2e9a2",
    "IQ1_S": "6f6e36796f55eb8e",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_entries_are_those_of_the_format(name: str) -> None:
    values = grid_values(name).numpy().astype("<i2")
    assert hashlib.sha256(values.tobytes()).hexdigest().startswith(DIGESTS[name])
    reader = getattr(gguf.quants, name)
    reader.init_grid()
    assert np.array_equal(values, reader.grid.reshape(values.shape).astype(np.int16))
    assert grid_digits(name).dtype == torch.uint8
    assert int(grid_digits(name).max()) < 8
