"""The table of GGUF's types is what the registry says."""

from tools.gguf_doc import PAGE, render


def test_the_table_is_what_the_registry_says() -> None:
    page = PAGE.read_text("utf-8")
    assert render(page) == page, "run python -m tools.gguf_doc"
    assert "| Q4_K | 12 | 4.50 | 4.62 |" in page
