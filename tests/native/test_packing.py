"""Blocks of GGUF files are packed natively as torch packs their words."""

import gguf
import pytest
import torch

from tests.model_executor.model_loader.gguf_files import random_blocks
from vllm.exceptions import EngineError
from vllm.model_executor.layers.quantization.gguf_blocks import BLOCK_FORMS, read_blocks
from vllm.model_executor.layers.quantization.panels import PackedRows
from vllm.native.packing import find_block_packer


@pytest.mark.parametrize("name", [name for name, form in BLOCK_FORMS.items() if form.is_moved])
def test_codes_of_blocks_lie_where_torch_puts_them(name: str) -> None:
    pack = find_block_packer(2)
    assert pack is not None
    width = 3 * BLOCK_FORMS[name].num_codes
    blocks = random_blocks(gguf.GGMLQuantizationType[name], 70, width, 5, 1.0)
    rows = torch.from_numpy(blocks)
    own = PackedRows(read_blocks(name, rows, pack), name)
    wanted = PackedRows(read_blocks(name, rows), name)
    assert torch.equal(own.codes, wanted.codes)
    # An order of rows, as conversions undo one.
    order = torch.arange(70).flip(0)
    turned = PackedRows(read_blocks(name, rows, pack).take_rows(order), name)
    wanted = PackedRows(read_blocks(name, rows).take_rows(order), name)
    assert torch.equal(turned.codes, wanted.codes)


def test_what_is_no_whole_number_of_blocks_is_refused() -> None:
    pack = find_block_packer(1)
    assert pack is not None
    with pytest.raises(EngineError, match="2 rows of Q4_0"):
        pack("Q4_0", torch.zeros((2, 19), dtype=torch.uint8))
