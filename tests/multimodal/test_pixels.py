"""Pixels, soft tokens and prompt ids against the processors of transformers, whole."""

from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from vllm.multimodal.decode import resize
from vllm.multimodal.families import ImageFamily, gemma3_images, gemma4_images, qwen35_images

_SHAPES = (
    *((96, 96), (64, 48), (300, 200), (33, 500), (500, 33)),
    *((640, 480), (17, 23), (224, 224), (1000, 700), (5, 5)),
)


def _picture(width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(width * 1000 + height).integers(
        0, 256, (height, width, 3), np.uint8
    )


def _resized(family: ImageFamily, pixels: Any) -> Any:
    size = family.sizes.fit(pixels.shape[1], pixels.shape[0])
    return resize(pixels, size, family.sizes.resample), size


@pytest.mark.parametrize("shape", _SHAPES)
def test_gemma3_reads_what_its_processor_reads(shape: tuple[int, int]) -> None:
    pixels = _picture(*shape)
    processor = Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
    expected = processor(images=Image.fromarray(pixels), return_tensors="np")["pixel_values"][0]

    own, _ = _resized(gemma3_images(), pixels)
    own = (own.astype(np.float32) / 255 - 0.5) / 0.5

    assert np.abs(own.transpose(2, 0, 1) - expected).max() < 1e-6


@pytest.mark.parametrize("budget", [70, 280])
@pytest.mark.parametrize("shape", _SHAPES)
def test_gemma4_reads_what_its_processor_reads(shape: tuple[int, int], budget: int) -> None:
    pixels = _picture(*shape)
    processor = Gemma4ImageProcessorPil(max_soft_tokens=budget)
    made = processor(images=Image.fromarray(pixels), return_tensors="np")

    own, size = _resized(gemma4_images(max_soft_tokens=budget), pixels)

    count = size.num_tokens * 9
    # Rows behind the picture's patches are padding.
    patches = own.reshape(size.height // 16, 16, size.width // 16, 16, 3).transpose(0, 2, 1, 3, 4)
    expected = made["pixel_values"][0][:count]
    assert np.abs(patches.reshape(count, 768).astype(np.float32) / 255 - expected).max() < 1e-6
    assert int(made["num_soft_tokens_per_image"][0]) == size.num_tokens


@pytest.mark.parametrize("most", [65_536, 1_048_576])
@pytest.mark.parametrize("shape", _SHAPES)
def test_qwen_reads_what_its_processor_reads(shape: tuple[int, int], most: int) -> None:
    pixels = _picture(*shape)
    edges = {"shortest_edge": 65_536, "longest_edge": most}
    processor = Qwen2VLImageProcessorPil(
        size=edges, patch_size=16, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    made = processor(images=Image.fromarray(pixels), return_tensors="np")

    own, size = _resized(qwen35_images(max_pixels=most), pixels)

    frames, rows, columns = made["image_grid_thw"][0]
    assert (frames, rows // 2, columns // 2) == (1, size.rows, size.columns)
    # A row of pixels is [channel, frame, row, column] of a patch; patches stand in 2 x 2 blocks.
    scaled = (own.astype(np.float32) / 255 - 0.5) / 0.5
    blocks = scaled.reshape(size.rows, 2, 16, size.columns, 2, 16, 3)
    patches = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, 16, 16)
    own_rows = np.repeat(patches, 2, axis=2).reshape(len(patches), -1)
    assert np.abs(own_rows - made["pixel_values"]).max() < 1e-6
