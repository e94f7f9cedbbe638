"""The layers that the pages show are those that are checked."""

import pytest

from tools.layers_doc import PAGES, read_layers, write_lists


def test_the_pages_show_the_layers_that_are_checked() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "<!-- layers: " in text
        assert write_lists(text) == text, f"{page.name}: run `make figures`"


def test_a_list_is_written_between_its_marks() -> None:
    name = "the Ascend tree points down too"
    page = f"a\n<!-- layers: {name} -->\nold\n<!-- end of layers -->\nb\n"
    written = write_lists(page)
    assert "old" not in written
    assert written.index("vllm_ascend.plugin") < written.index("vllm_ascend.core")
    assert (written[:2], written[-2:]) == ("a\n", "b\n")
    with pytest.raises(KeyError):
        read_layers("none such")
