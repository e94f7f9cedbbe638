"""What becomes of every request field that a route knows beyond its own, as data.

    honoured         a field of the route's model: it does what its name says
    without effect   known; cannot change the answer: accepted, and named in X-Ignored-Fields
    refused          known; would change the answer, so only a value that asks for nothing is taken
    unknown          accepted, and named in X-Ignored-Fields

``tools/request_fields.py`` writes the tables of docs/apis.md from this.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import UnsupportedFeatureError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
DECISIONS = "/v1/decisions"
POOLING = "/v1/embeddings"
IGNORED_FIELDS = "X-Ignored-Fields"


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """A field that is accepted and changes nothing.

    Attributes:
        why: Why it may be.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is taken only where it asks for nothing.

    Attributes:
        values: That ask for nothing; null always does.
        advice: What to do instead.
    """

    values: tuple[Any, ...] = ()
    advice: str = "leave it out"


KnownField = WithoutEffect | Refused

_OFF = Refused((False,))
_EMPTY_LIST = Refused(([],))
_EMPTY_OBJECT = Refused(({},))
_FOR_ACCOUNTS = WithoutEffect("tells end users apart for abuse reports, which nobody reads here")
_ONE_TIER = WithoutEffect("there is one tier of service")
_BY_CONTENT = WithoutEffect("prefixes are found by their tokens, and kept as long as there is room")
_NO_STORE = WithoutEffect("nothing is kept of this route's answers")
_NOT_DRAWN = WithoutEffect("nothing is generated: probabilities are read")
_LENGTH = WithoutEffect("models here know no such setting: ask for it in the prompt")

_SHARED: Mapping[str, KnownField] = {
    "best_of": Refused((1,), "use n"),
    "length_penalty": Refused((1,)),
    "use_beam_search": _OFF,
    "early_stopping": _OFF,
    "logprob_token_ids": Refused(),
    "stream_interval": Refused((1,)),
    "vllm_xargs": _EMPTY_OBJECT,
    "return_prompt_text": _OFF,
    "prompt_embeds": Refused(),
    "guided_decoding_backend": WithoutEffect("there is one backend"),
    "safety_identifier": _FOR_ACCOUNTS,
    "service_tier": _ONE_TIER,
    "user": _FOR_ACCOUNTS,
}
_OF_CHATS: Mapping[str, KnownField] = {
    "media_io_kwargs": _EMPTY_OBJECT,
    "chat_template": Refused((), "start the server with --chat-template"),
    "documents": _EMPTY_LIST,
}

KNOWN_FIELDS: Mapping[str, Mapping[str, KnownField]] = {
    COMPLETIONS: {
        **_SHARED,
        "prompt_cache_options": _BY_CONTENT,
        "suffix": Refused(("",)),
        "metadata": _NO_STORE,
        "store": _NO_STORE,
        "tools": Refused((), "use /v1/chat/completions"),
        "tool_choice": Refused(("none",), "use /v1/chat/completions"),
        "parallel_tool_calls": WithoutEffect("there are no calls on this route"),
    },
    CHAT: {
        **_SHARED,
        **_OF_CHATS,
        "functions": Refused(([],), "use tools"),
        "function_call": Refused(("none", "auto"), "use tool_choice"),
        "modalities": Refused((["text"],), "only texts are served"),
        "audio": Refused((), "only texts are served"),
        "web_search_options": Refused((), "give a tool of your own"),
        "metadata": _NO_STORE,
        "store": _NO_STORE,
        "moderation": Refused(),
        "prediction": WithoutEffect("drafts are the server's: --speculative-config"),
        "verbosity": _LENGTH,
    },
    RESPONSES: {
        **_SHARED,
        **_OF_CHATS,
        "conversation": Refused((), "send previous_response_id or the items"),
        "prompt": Refused((), "send its text as instructions"),
        "moderation": Refused(),
        "context_management": _EMPTY_LIST,
        "client_metadata": WithoutEffect("it is the client's own"),
    },
    MESSAGES: {
        **_SHARED,
        **_OF_CHATS,
        "prompt_cache_options": _BY_CONTENT,
        "container": Refused(),
        "mcp_servers": _EMPTY_LIST,
        "context_management": WithoutEffect("the prompt holds all that was sent"),
        "inference_geo": WithoutEffect("there is one place"),
        "metadata": _FOR_ACCOUNTS,
        "speed": _ONE_TIER,
    },
    DECISIONS: {
        "stream": _OFF,
        "tools": _EMPTY_LIST,
        "max_output_tokens": _NOT_DRAWN,
        "n": Refused((1,), "ask in several orders with x_permutations"),
        "reasoning": _NOT_DRAWN,
        "seed": _NOT_DRAWN,
        "temperature": WithoutEffect("--decision-temperature is the server's, fitted for all"),
        "top_p": _NOT_DRAWN,
        "metadata": _NO_STORE,
        "service_tier": _ONE_TIER,
        "store": _NO_STORE,
        "user": _FOR_ACCOUNTS,
    },
    # And all other routes for vectors and scores.
    POOLING: {
        "normalize": Refused((True,), "use use_activation"),
        "output_dtype": Refused(("float",), "use encoding_format, or /v2/embed for bits"),
        "late_chunking": _OFF,
        "embedding_type": Refused(("float",), "use encoding_format, or /v2/embed for bits"),
        "images": _EMPTY_LIST,
        "mm_processor_kwargs": _EMPTY_OBJECT,
        "chat_template": Refused((), "start the server with --chat-template"),
        "padding": WithoutEffect("texts of different lengths share a step without it"),
        "user": _FOR_ACCOUNTS,
        "safety_identifier": _FOR_ACCOUNTS,
        "service_tier": _ONE_TIER,
    },
}


def check_extra_fields(extra: Mapping[str, Any] | None, route: str = COMPLETIONS) -> list[str]:
    """Check the fields a request has beyond those of its route's model.

    Args:
        extra: They.
        route: One of ``KNOWN_FIELDS``.

    Returns:
        The names of those without effect, known ones or not.

    Raises:
        UnsupportedFeatureError: A known field asks for what is not served yet.
    """
    ignored: list[str] = []
    known = KNOWN_FIELDS[route]
    for name, value in (extra or {}).items():
        field = known.get(name)
        if isinstance(field, Refused):
            _check_neutral(name, value, field)
        elif value is not None or field is None:
            ignored.append(name)
    return ignored


def _check_neutral(name: str, value: Any, field: Refused) -> None:
    # 1 == True in Python, but not in JSON.
    equal = (value == v and isinstance(value, bool) == isinstance(v, bool) for v in field.values)
    if value is None or any(equal):
        return
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:60] + "..."
    raise UnsupportedFeatureError(
        f"{name}={shown} is not supported by this server: {field.advice}.", name
    )


def ignored_fields_header(ignored: list[str]) -> dict[str, str]:
    """Return the response header that lists ignored fields; none when there are none."""
    if not ignored:
        return {}
    # Field names are the client's text: only what a header can carry, and not without end.
    shown = [name.encode("ascii", "backslashreplace").decode() for name in ignored[:32]]
    printable = ["".join(c if 32 < ord(c) < 127 else "?" for c in name[:64]) for name in shown]
    return {IGNORED_FIELDS: ", ".join(printable)}
