"""Names of requests."""

from typing import Any

from vllm.entrypoints.openai.request_scope import header_request_id


def _scope(*values: bytes) -> dict[str, Any]:
    return {"type": "http", "headers": [(b"x-request-id", value) for value in values]}


def test_the_client_names_its_request() -> None:
    assert header_request_id(_scope(b"mine")) == "mine"
    assert len(header_request_id(_scope(b"x" * 10_000))) == 256


def test_a_new_name_stays_the_same_within_a_request() -> None:
    scope = _scope()
    assert header_request_id(scope) == header_request_id(scope)
    assert header_request_id(scope) != header_request_id(_scope())
    assert header_request_id(_scope(b""))
