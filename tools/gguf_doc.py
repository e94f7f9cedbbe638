"""Writes the tables of GGUF's types and architectures in docs/: ``python -m tools.gguf_doc``.

Types are in docs/quantisation.md, architectures in docs/models.md.
"""

from pathlib import Path

from vllm.model_executor.layers.quantization.gguf_blocks import BLOCK_FORMS, kept_block_bytes
from vllm.model_executor.model_loader.gguf_architectures import ARCHITECTURES
from vllm.utils.gguf_file import TYPES

_DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, MODELS_PAGE = _DOCS / "quantisation.md", _DOCS / "models.md"
_FIRST, _LAST = "<!-- gguf architectures: begin -->", "<!-- gguf architectures: end -->"
_BEGIN, _END = "<!-- gguf types: begin -->", "<!-- gguf types: end -->"
_KINDS = {
    "int8": "bytes",
    "int6": "six bits",
    "e2m1": "four bits, floats",
    "iq4": "four bits, a table",
    "odd4": "four bits, odd numbers",
    "uint2": "two bits",
    "int2": "two bits",
    "int3": "three bits",
    "iq1": "three bits, a table",
    "iq2": "three bits, a table",
    "iq2_xxs": "the file's indexes",
    "iq3_xxs": "the file's indexes",
}


def render(page: str) -> str:
    """Return a page with its table as the registry has it."""
    before, rest = page.split(_BEGIN)
    behind = rest.split(_END)[1]
    rows = ["| type | number | bits in the file | bits in memory | kept as |"]
    rows.append("|---|--:|--:|--:|---|")
    for number, block in sorted(TYPES.items(), key=lambda item: item[1].name):
        form = BLOCK_FORMS.get(block.name)
        if form is None:
            continue
        kept = kept_block_bytes(block.name)
        rows.append(
            f"| {block.name} | {number} | {8 * block.num_bytes / block.size:.2f} | "
            f"{8 * kept / block.size:.2f} | {_KINDS.get(form.kind, 'four bits')} |"
        )
    return "\n".join([before + _BEGIN, *rows, _END + behind])


def render_models(page: str) -> str:
    """Return a page with the table of architectures as the registry has it."""
    before, rest = page.split(_FIRST)
    behind = rest.split(_LAST)[1]
    rows = ["| `general.architecture` | served as | its block that drafts |", "|---|---|---|"]
    for name, own in sorted(ARCHITECTURES.items()):
        drafts = "none" if own.drafts is None else "in the file, or in one of its own"
        rows.append(f"| `{name}` | `{own.model}` | {drafts} |")
    return "\n".join([before + _FIRST, *rows, _LAST + behind])


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text("utf-8")), "utf-8")
    MODELS_PAGE.write_text(render_models(MODELS_PAGE.read_text("utf-8")), "utf-8")
