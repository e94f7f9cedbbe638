"""Calls as the whole answer, each an object: ``{"name": ..., "parameters": {...}}`` (Llama 3)."""

from vllm.parser.bare import PYTHON_TAG, BareCallReader
from vllm.parser.dialect import BlockReader
from vllm.parser.field_tags import FUNCTION, FUNCTION_TAGS, TagFormats
from vllm.parser.offered import Offered
from vllm.parser.tag_block import TagBlockReader

_FORMATS = TagFormats(FUNCTION_TAGS)


class LlamaDialect:
    """See ToolDialect."""

    # A tag that Llama 3.1's card tells of, too.
    marks: tuple[str, ...] = (PYTHON_TAG, FUNCTION)
    leads: tuple[str, ...] = ("{",)
    quotes: tuple[str, ...] = ()
    telltales: tuple[str, ...] = (PYTHON_TAG[:8],)
    ends_reasoning = False
    is_special = False

    def read_block(self, opened_by: str, offered: Offered) -> BlockReader:
        """Return the reader of what follows a mark or lead."""
        if opened_by == FUNCTION:
            return TagBlockReader(_FORMATS, offered, opened_by, is_outer=False)
        return BareCallReader(opened_by, offered)


LLAMA = LlamaDialect()
