"""Ids of requests, as clients know them."""

import re

# Prompt of an HTTP body and its unique part, then the engine's own number.
_INTERNAL_PARTS = re.compile(r"(-\d+-[0-9a-f]{8})?-[0-9a-f]{8}$")


def response_id(request_id: str) -> str:
    """Return a request's id as its response has it."""
    return _INTERNAL_PARTS.sub("", request_id)
