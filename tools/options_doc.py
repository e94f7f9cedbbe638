"""The tables of flags in docs/configuration.md, from the options: ``python -m tools.options_doc``.

A table stands between ``<!-- options: GROUP -->`` and ``<!-- end -->``; what is around stays.
"""

import json
import re
from pathlib import Path
from typing import Any

from vllm.config.options import NamedOption, options_of
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.option_flags import is_switch

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
_TABLE = re.compile(r"<!-- options: ([\w ]+) -->\n.*?<!-- end -->", re.DOTALL)
# What stands in code type: flags, variables, files, routes, JSON, hosts and URLs.
_CODE = re.compile(
    r"'?(?P<json>\{\".*?\})'?"
    r"|(?P<name>--[a-z][\w-]*|\b[A-Z]+_[A-Z_]+(?:=\d+)?\b|docs/\w+\.md|https?://[^\s,)]+"
    r"|(?<![\w./])/\w+(?:/\w+)*(?:/\*)?(?:,/\w+)*)"
)
_MIB = 1 << 20


def render(page: str) -> str:
    """Return the page with its tables as the options say."""
    return _TABLE.sub(lambda match: _table(match[1]), page)


def _table(group: str) -> str:
    options = [o for owner in (ServerArgs, EngineArgs) for o in options_of(owner)]
    rows = [_row(option) for option in options if option.about.group == group]
    head = ["| flag | default | meaning |", "|---|---|---|"]
    return "\n".join([f"<!-- options: {group} -->", *head, *rows, "<!-- end -->"])


def _row(option: NamedOption) -> str:
    about = option.about
    names = [option.flag, *(name for name in about.also if name.startswith("--"))]
    if is_switch(option):
        names.append(f"--no-{option.flag[2:]}")
    text = about.text.removesuffix(f" Default: {_plain(option.default)}.")
    parts = [_mark_code(text), about.more]
    if about.choices:
        parts.append(f"One of {', '.join(f'`{choice}`' for choice in about.choices)}.")
    flags = " / ".join(f"`{name}`" for name in names)
    meaning = " ".join(part for part in parts if part).replace("|", "\\|")
    return f"| {flags} | {_show(option.default)} | {meaning} |"


def _mark_code(text: str) -> str:
    return _CODE.sub(lambda match: f"`{match['json'] or match['name']}`", text)


def _show(default: Any) -> str:
    shown = _plain(default)
    return shown if shown in ("", "on", "off") else f"`{shown}`"


def _plain(default: Any) -> str:
    """Return a default as help texts write it; empty: there is none."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int) and default >= _MIB and default % _MIB == 0:
        return f"{default // _MIB}M"
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, tuple | dict):
        return json.dumps(default) if default else ""
    return "" if default is None else str(default)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text("utf-8")), "utf-8")
