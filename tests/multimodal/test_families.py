"""Sizes of pictures against published figures and against transformers' own processors."""

import pytest
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    get_aspect_ratio_preserving_size,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from vllm.exceptions import UserInputError
from vllm.multimodal.families import (
    DETAILS,
    GEMMA4_BUDGETS,
    gemma3_images,
    gemma4_images,
    qwen35_images,
)

_SHAPES = (
    *((224, 224), (640, 480), (1600, 1200), (1920, 1080), (4000, 3000), (100, 1000)),
    *((32, 32), (1, 1), (31, 33), (48, 2000), (3000, 17), (817, 1213), (16, 16), (79, 81)),
)
# (Gemma 4 at 70, 280 and 1120; Qwen 3.5)
_TOKENS = {
    (224, 224): (64, 256, 1089, 64),
    (640, 480): (63, 266, 1064, 300),
    (1600, 1200): (63, 266, 1064, 1900),
    (1920, 1080): (66, 264, 1100, 2040),
    (4000, 3000): (63, 266, 1064, 11750),
    (100, 1000): (52, 260, 1050, 93),
}


@pytest.mark.parametrize("shape", _TOKENS)
def test_published_shapes_have_the_published_number_of_soft_tokens(
    shape: tuple[int, int],
) -> None:
    gemma = gemma4_images().sizes
    of_gemma = [
        gemma.with_settings({"max_soft_tokens": budget}).fit(*shape).num_tokens
        for budget in (70, 280, 1120)
    ]

    assert (*of_gemma, qwen35_images().sizes.fit(*shape).num_tokens) == _TOKENS[shape]
    assert gemma3_images().sizes.fit(*shape).num_tokens == 256


@pytest.mark.parametrize("shape", _SHAPES)
def test_sizes_are_those_of_transformers(shape: tuple[int, int]) -> None:
    width, height = shape
    for budget in GEMMA4_BUDGETS:
        expected = get_aspect_ratio_preserving_size(height, width, 16, budget * 9, 3)
        size = gemma4_images(max_soft_tokens=budget).sizes.fit(width, height)
        assert (size.height, size.width) == expected
        assert (size.rows * 48, size.columns * 48) == expected
        assert size.num_tokens <= budget
    for most in (262_144, 1_048_576, 16_777_216):
        size = qwen35_images(max_pixels=most).sizes.fit(width, height)
        expected = smart_resize(height, width, factor=32, min_pixels=65_536, max_pixels=most)
        assert (size.height, size.width) == expected
        assert (size.rows * 32, size.columns * 32) == expected


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        (qwen35_images(), (1, 201)),
        (qwen35_images(), (4020, 20)),
        # A table of positions that ends before a thin picture does.
        (gemma4_images(max_cells=85), (1, 10_000)),
        (gemma4_images(max_cells=85), (10_000, 100)),
    ],
)
def test_shapes_that_the_model_does_not_read_are_refused(family, shape) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserInputError, match=f"{shape[0]} x {shape[1]}"):
        family.sizes.fit(*shape)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (gemma3_images(), {"max_soft_tokens": 70}),
        (gemma3_images(), {"do_pan_and_scan": True}),
        (gemma4_images(), {"max_soft_tokens": 100}),
        (gemma4_images(), {"max_soft_tokens": 280.0}),
        (gemma4_images(), {"max_pixels": 280}),
        (qwen35_images(), {"max_pixels": 17_000_000}),
        (qwen35_images(), {"max_pixels": 12}),
        (qwen35_images(), {"max_pixels": True}),
        (qwen35_images(), {"min_pixels": 2_000_000, "max_pixels": 1_000_000}),
        (qwen35_images(), {"size": {"height": 3}}),
        (qwen35_images(), {"size": 3}),
        (qwen35_images(), {"do_resize": False}),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(family, settings) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserInputError, match="mm_processor_kwargs"):
        family.sizes.with_settings(settings)


def test_both_spellings_of_an_area_mean_the_same() -> None:
    sizes = qwen35_images().sizes
    spelled = sizes.with_settings({"size": {"longest_edge": 500_000, "shortest_edge": 70_000}})

    assert spelled == sizes.with_settings({"max_pixels": 500_000, "min_pixels": 70_000})
    assert spelled.fit(4000, 3000).num_tokens <= 500_000 // 1024


def test_detail_changes_the_size_but_where_there_is_one_only() -> None:
    of_detail = {
        family.name: [family.sizes.with_detail(d).fit(4000, 3000).num_tokens for d in DETAILS]
        for family in (
            gemma3_images(),
            gemma4_images(max_soft_tokens=280),
            qwen35_images().for_cpu(),
        )
    }

    assert of_detail["gemma3"] == [256] * 4
    assert of_detail["gemma4"] == [266, 63, 266, 266]
    auto, low, high, original = of_detail["qwen3_5"]
    assert low <= 256 < auto <= 1024 < high == original == 11_750


def test_no_request_exceeds_the_most_tokens_of_a_family() -> None:
    for family in (gemma3_images(), gemma4_images(), qwen35_images().for_cpu()):
        sizes = [family.sizes.with_detail(detail) for detail in DETAILS]
        most = max(rule.fit(w, h).num_tokens for rule in sizes for w, h in _SHAPES)
        assert most <= family.max_tokens


@pytest.mark.parametrize("budget", GEMMA4_BUDGETS)
def test_the_release_has_positions_for_every_shape(budget: int) -> None:
    sizes = gemma4_images(max_soft_tokens=budget).sizes
    for shape in ((1, 10_000), (10_000, 1), (2, 3_000), (300, 40_000)):
        assert sizes.fit(*shape).num_tokens <= budget


def test_a_side_may_be_as_long_as_the_table_of_positions() -> None:
    columns = gemma4_images().sizes.fit(85, 1).columns
    assert gemma4_images(max_cells=columns).sizes.fit(85, 1).columns == columns
    with pytest.raises(UserInputError, match=f"{columns} soft tokens long"):
        gemma4_images(max_cells=columns - 1).sizes.fit(85, 1)
