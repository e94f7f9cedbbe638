"""Writes the table of GGUF's types in docs/quantisation.md: ``python -m tools.gguf_doc``."""

from pathlib import Path

from vllm.model_executor.layers.quantization.gguf_blocks import BLOCK_FORMS, kept_block_bytes
from vllm.utils.gguf_file import TYPES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "quantisation.md"
_BEGIN, _END = "<!-- gguf types: begin -->", "<!-- gguf types: end -->"
_KINDS = {
    "int8": "bytes",
    "int6": "six bits",
    "e2m1": "four bits, floats",
    "iq4": "four bits, a table",
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


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text("utf-8")), "utf-8")
