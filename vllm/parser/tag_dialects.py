"""Families that write calls between tags: DeepSeek, Hermes and Qwen, GLM.

    <tool_call>                    <tool_call>                   <tool_call>find
    {"name": "find",               <function=find>               <arg_key>text</arg_key>
     "arguments": {"text": "x"}}   <parameter=text>              <arg_value>x</arg_value>
    </tool_call>                   x                             </tool_call>
                                   </parameter>
                                   </function>
                                   </tool_call>

``vllm.tokenizers.deepseek_v4_tools`` shows DeepSeek's. Models write each other's calls, and leave
tags out: one reader takes them all.
"""

import re

from vllm.parser.bare import BareCallReader
from vllm.parser.dialect import BlockReader
from vllm.parser.fenced import FENCE, FencedCallReader
from vllm.parser.field_tags import (
    ARGUMENT_TAGS,
    FUNCTION,
    FUNCTION_TAGS,
    TOOL_CALL,
    FieldTags,
    TagFormats,
)
from vllm.parser.offered import Offered
from vllm.parser.tag_block import TagBlockReader
from vllm.tokenizers.deepseek_v4_tools import BLOCK_GAP, DSML, V4_TAGS, V41_TAGS, DsmlTags

# Models misspell the outer tag, and leave it out: any tag opens a block.
_TAG, _END_TAG = f"<{DSML}", f"</{DSML}"
_OUTER = ("tool_calls", "toolcalls", "tool_call", "tool", "function_calls", "functions", "calls")
_TAGS = ("invoke", "parameter", *_OUTER)
_BEGUN_TAGS = "|".join(tag[:n] for tag in _TAGS for n in range(len(tag), 0, -1))


def _dsml_fields(tags: DsmlTags) -> FieldTags:
    return FieldTags(
        call=tags.open("invoke"),
        call_head=re.compile(r'\s+name\s*=\s*"(?P<name>[^"]+)"\s*>'),
        call_ends=(tags.close("invoke"),),
        field=tags.open("parameter"),
        field_head=re.compile(
            r'\s+name\s*=\s*"(?P<name>[^"]*)"(?:\s+string\s*=\s*"(?P<string>true|false)")?\s*>'
        ),
        field_end=tags.close("parameter"),
        block_ends=tuple(tags.close(name) for name in _OUTER),
        blocks=tuple(f"{tags.open(name)}>" for name in _OUTER),
        unsaid=re.compile(
            rf'</?{DSML}{tags.gap}(?:(?:{_BEGUN_TAGS})(?!\w))?(?:\s+name\s*=?\s*"?)?\s*>?'
        ),
    )


_V4_FIELDS, _V41_FIELDS = _dsml_fields(V4_TAGS), _dsml_fields(V41_TAGS)


class DsmlDialect:
    """See ToolDialect.

    Args:
        formats: Ways of writing a call; the first is the release's own.
    """

    # The blank line before a block is a part of it.
    marks: tuple[str, ...] = (BLOCK_GAP + _TAG, _TAG, _END_TAG)
    leads: tuple[str, ...] = ()
    quotes: tuple[str, ...] = ()
    telltales: tuple[str, ...] = (DSML[0], BLOCK_GAP + "<")
    ends_reasoning = True
    is_special = True

    def __init__(self, *formats: FieldTags) -> None:
        self._formats = TagFormats(*formats)

    def read_block(self, opened_by: str, offered: Offered) -> TagBlockReader:
        """Return the reader of what follows a mark."""
        return TagBlockReader(self._formats, offered, opened_by, is_outer=False)


class ToolCallTagDialect:
    """See ToolDialect.

    Args:
        formats: Ways of writing a call; the first is the family's own.
        may_be_bare: Whether models leave the outer tag out.
        may_be_untagged: Whether an answer may begin with calls without tags: objects, or a fence of
            them; fences of calls count behind it, too.
        ends_reasoning: Whether a call inside the reasoning ends it.
    """

    is_special = False

    def __init__(
        self,
        *formats: FieldTags,
        may_be_bare: bool = False,
        may_be_untagged: bool = False,
        ends_reasoning: bool = True,
    ) -> None:
        self.leads: tuple[str, ...] = (FENCE, "{") if may_be_untagged else ()
        self.quotes: tuple[str, ...] = ("\n" + FENCE, FENCE) if may_be_untagged else ()
        bare = (FUNCTION,) if may_be_bare else ()
        self.marks: tuple[str, ...] = ("\n" + TOOL_CALL, TOOL_CALL, *bare, *self.quotes)
        self.telltales: tuple[str, ...] = ("<tool_", *(mark[:-1] for mark in bare))
        self.ends_reasoning = ends_reasoning
        self._formats = TagFormats(*formats)

    def read_block(self, opened_by: str, offered: Offered) -> BlockReader:
        """Return the reader of what follows a mark or lead."""
        if opened_by.endswith(FENCE):
            return FencedCallReader(opened_by, offered)
        if opened_by == "{":
            return BareCallReader(opened_by, offered)
        is_outer = opened_by.endswith(TOOL_CALL)
        return TagBlockReader(self._formats, offered, opened_by, is_outer=is_outer)


DSML_V4 = DsmlDialect(_V4_FIELDS)
DSML_V41 = DsmlDialect(_V41_FIELDS, _V4_FIELDS)
HERMES = ToolCallTagDialect(
    FUNCTION_TAGS, ARGUMENT_TAGS, may_be_untagged=True, ends_reasoning=False
)
QWEN3_CODER = ToolCallTagDialect(FUNCTION_TAGS, ARGUMENT_TAGS, may_be_bare=True)
GLM = ToolCallTagDialect(ARGUMENT_TAGS, FUNCTION_TAGS)
