"""The tables of GGUF's types and architectures are what the registries say."""

from tools.gguf_doc import MODELS_PAGE, PAGE, render, render_models


def test_the_table_is_what_the_registry_says() -> None:
    page = PAGE.read_text("utf-8")
    assert render(page) == page, "run python -m tools.gguf_doc"
    assert "| Q4_K | 12 | 4.50 | 4.62 |" in page


def test_the_table_of_architectures_is_what_the_registry_says() -> None:
    page = MODELS_PAGE.read_text("utf-8")
    assert render_models(page) == page, "run python -m tools.gguf_doc"
    assert "| `deepseek4` | `DeepseekV4ForCausalLM` |" in page
