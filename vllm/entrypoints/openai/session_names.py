"""Which conversation or agent a request is of: the names that clients really send.

    X-Claude-Code-Session-Id                                Claude Code
    metadata.user_id, a JSON text with session_id           Claude Code
    Session-Id, session_id (headers)                        Codex
    X-Session-Id, X-Session-Affinity                        opencode, crush, gateways
    session_id (body)                                       ours, and SGLang's
    prompt_cache_key                                        OpenAI's API

The first that is there counts. ``X-Client-Request-Id`` is none of them: some draw it for each call.
"""

from typing import Any

import msgspec
from starlette.datastructures import Headers

from vllm.entrypoints.openai.protocol.requests import EngineRequest
from vllm.exceptions import UserInputError

MAX_SESSION_CHARS = 256
_BEFORE_METADATA = ("x-claude-code-session-id",)
_BEHIND_METADATA = ("session-id", "session_id", "x-session-id", "x-session-affinity")
_USER_ID = "metadata.user_id"


def find_session(headers: Headers, body: EngineRequest) -> str | None:
    """Return the session that a request names; None: it names none.

    Raises:
        UserInputError: The name is empty or too long; ``param`` says where it stands.
    """
    found: list[tuple[str, Any]] = [(name, headers.get(name)) for name in _BEFORE_METADATA]
    found.append((_USER_ID, _in_metadata(body)))
    found += [(name, headers.get(name)) for name in _BEHIND_METADATA]
    found.append(("session_id", body.session_id))
    given = [(where, name) for where, name in found if name is not None]
    for where, name in given:
        check_session(name, where)
    if given:
        return str(given[0][1])
    # Its own length is its API's affair: what is too long for a label labels nothing.
    key = body.prompt_cache_key
    return key if key and len(key) <= MAX_SESSION_CHARS else None


def check_session(name: Any, where: str) -> None:
    """Refuse what is no session's name.

    Raises:
        UserInputError: It is no text of 1 to 256 characters.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_SESSION_CHARS:
        raise UserInputError(
            f"{where} must be a text of 1 to {MAX_SESSION_CHARS} characters, not "
            f"{str(name)[:60]!r}.",
            where,
        )


def _in_metadata(body: EngineRequest) -> Any:
    """Return ``session_id`` of the JSON text that ``metadata.user_id`` may be; else None."""
    extra = body.model_extra or {}
    metadata = getattr(body, "metadata", None) or extra.get("metadata")
    text = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(text, str) or not text.startswith("{"):
        return None
    try:
        told = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    return told.get("session_id") if isinstance(told, dict) else None
