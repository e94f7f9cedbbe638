"""Where a JSON schema's references within itself lead."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def follow_reference(document: Any, reference: str) -> Any:
    """Return what a ``$ref`` such as ``#/$defs/Item`` points to; None: nothing in this document."""
    if reference in ("#", "#/"):
        return document
    if not reference.startswith("#/"):
        return None
    found = document
    for part in reference.removeprefix("#/").split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
