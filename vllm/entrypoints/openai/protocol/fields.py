"""Which request fields are honoured, which only in a neutral value, and which are merely ignored.

A field is one of four kinds:

    honoured     does what its name says
    neutral      known; accepted only with a value that asks for nothing, else 400 naming it
    harmless     known; cannot change the answer, accepted and not used
    unknown      accepted, listed in the response's X-Ignored-Fields header
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import UnsupportedFeatureError


@dataclass(frozen=True, slots=True)
class NeutralField:
    """Values of an unsupported field that ask for nothing, and what to do otherwise."""

    values: tuple[Any, ...] = ()
    advice: str = "leave it out"


_OFF = NeutralField((False,))
_EMPTY_TEXT = NeutralField(("",))
_EMPTY_LIST = NeutralField(([],))
_EMPTY_OBJECT = NeutralField(({},))
_ABSENT = NeutralField()

# null always asks for nothing.
NEUTRAL_FIELDS: Mapping[str, NeutralField] = {
    "best_of": NeutralField((1,), "use n"),
    "length_penalty": NeutralField((1,)),
    "use_beam_search": _OFF,
    "early_stopping": _OFF,
    "suffix": _EMPTY_TEXT,
    "logprob_token_ids": _ABSENT,
    "stream_interval": NeutralField((1,)),
    "vllm_xargs": _EMPTY_OBJECT,
    "return_prompt_text": _OFF,
    "prompt_embeds": _ABSENT,
    # Chat only.
    "functions": _ABSENT,
    "function_call": NeutralField(("none",)),
    "modalities": NeutralField((["text"],)),
    "audio": _ABSENT,
    "prediction": _ABSENT,
    "web_search_options": _ABSENT,
    "documents": _EMPTY_LIST,
    "chat_template": NeutralField((), "start the server with --chat-template"),
    "mm_processor_kwargs": _EMPTY_OBJECT,
    "media_io_kwargs": _EMPTY_OBJECT,
    "verbosity": NeutralField(("medium",)),
}

# Honoured by the APIs of chats; elsewhere they would change the answer if anyone heard them.
_CHAT_FIELDS: Mapping[str, NeutralField] = {
    "tools": NeutralField((), "use /v1/chat/completions"),
    "tool_choice": NeutralField(("none",), "use /v1/chat/completions"),
    "parallel_tool_calls": NeutralField((True, False)),
}

HARMLESS_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "session_id",
        "guided_decoding_backend",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)


def check_extra_fields(extra: Mapping[str, Any] | None) -> list[str]:
    """Check the fields a request has beyond the honoured ones.

    Returns:
        The names nobody knows, which are ignored.

    Raises:
        UnsupportedFeatureError: A known field asks for what is not served yet.
    """
    ignored: list[str] = []
    for name, value in (extra or {}).items():
        known = NEUTRAL_FIELDS.get(name) or _CHAT_FIELDS.get(name)
        if known is not None:
            _check_neutral(name, value, known)
        elif name not in HARMLESS_FIELDS:
            ignored.append(name)
    return ignored


def _check_neutral(name: str, value: Any, field: NeutralField) -> None:
    # 1 == True in Python, but not in JSON.
    equal = (value == v and isinstance(value, bool) == isinstance(v, bool) for v in field.values)
    if value is None or any(equal):
        return
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:60] + "..."
    raise UnsupportedFeatureError(
        f"{name}={shown} is not supported by this server yet: {field.advice}.", name
    )


def ignored_fields_header(ignored: list[str]) -> dict[str, str]:
    """Return the response header that lists ignored fields; none when there are none."""
    if not ignored:
        return {}
    # Field names are the client's text: only what a header can carry, and not without end.
    shown = [name.encode("ascii", "backslashreplace").decode() for name in ignored[:32]]
    printable = ["".join(c if 32 < ord(c) < 127 else "?" for c in name[:64]) for name in shown]
    return {"X-Ignored-Fields": ", ".join(printable)}
