"""Every dotted name that docs/compat.md promises can be imported."""

import importlib
import re
from pathlib import Path

import pytest

DOC = Path(__file__).resolve().parent.parent / "docs" / "compat.md"


def promised_names() -> list[tuple[str, str]]:
    pairs = []
    for line in DOC.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"\| `([\w.]+)` \| (.*) \|", line)
        if match is not None:
            pairs += [(match.group(1), name) for name in re.findall(r"`(\w+)`", match.group(2))]
    return pairs


@pytest.mark.parametrize(("module", "name"), promised_names())
def test_name_is_there(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_the_list_is_not_empty() -> None:
    assert len(promised_names()) > 80
