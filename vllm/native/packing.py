"""Blocks of GGUF files into panels in one native call: the words of ``gguf_blocks``."""

import torch

from vllm import envs
from vllm.exceptions import EngineError
from vllm.model_executor.layers.quantization.gguf_blocks import BLOCK_FORMS, BlockPacker
from vllm.model_executor.layers.quantization.panels import allocate_beside, unit_of
from vllm.native.loader import load_library
from vllm.native.tensors import address_of
from vllm.v1.attention.ops.stored import PANEL


def find_block_packer(num_threads: int) -> BlockPacker | None:
    """Returns what packs a matrix's blocks, with so many threads; None: there is no library."""
    library = load_library() if envs.VLLM_NATIVE else None
    if library is None:
        return None

    def pack(type_name: str, rows: torch.Tensor) -> torch.Tensor:
        form, (num_rows, row_bytes) = BLOCK_FORMS[type_name], rows.shape
        num_words = unit_of(form.kind).count_words(form.count_columns(row_bytes))
        panels = allocate_beside((-(-num_rows // PANEL), num_words, PANEL), torch.int32)
        blocks = address_of(rows, torch.uint8, num_rows, row_bytes)
        status = library.vn_pack_blocks(
            type_name.encode(), blocks, num_rows, row_bytes, num_threads, panels.data_ptr()
        )
        if status:
            raise EngineError(
                f"{num_rows} rows of {type_name} cannot be packed (status {status}): memory or "
                "threads are short"
            )
        return panels

    return pack
