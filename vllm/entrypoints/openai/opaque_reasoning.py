"""Reasoning as an opaque text, for clients that hand it back without reading it.

``encrypted_content`` of the Responses API and ``signature`` of the Messages API carry it. It is
encoded, not encrypted: whoever got it could have had the reasoning itself.
"""

import base64
import binascii
import hashlib

_PREFIX = "rsn1."
_NUM_CHECK_CHARS = 12


def seal_reasoning(text: str) -> str:
    """Return a text of ASCII letters that ``open_reasoning`` turns back."""
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    return f"{_PREFIX}{_check(encoded)}.{encoded}"


def open_reasoning(sealed: str) -> str | None:
    """Return the reasoning; None if the text was not made here, or was altered."""
    if not sealed.startswith(_PREFIX):
        return None
    check, _, encoded = sealed[len(_PREFIX) :].partition(".")
    try:
        if check != _check(encoded):
            return None
        return base64.urlsafe_b64decode(encoded.encode("ascii")).decode()
    except (binascii.Error, UnicodeError):
        return None


def _check(encoded: str) -> str:
    return hashlib.sha256(encoded.encode()).hexdigest()[:_NUM_CHECK_CHARS]
