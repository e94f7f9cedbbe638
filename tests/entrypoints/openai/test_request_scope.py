"""Names of requests."""

from typing import Any

import pytest
from starlette.requests import Request

from vllm.entrypoints.openai.request_scope import header_data_parallel_rank, header_request_id
from vllm.exceptions import UserInputError


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


def _with_rank(*values: bytes) -> Request:
    return Request({"type": "http", "headers": [(b"x-data-parallel-rank", v) for v in values]})


def test_the_client_may_choose_a_core() -> None:
    assert header_data_parallel_rank(_with_rank()) is None
    assert header_data_parallel_rank(_with_rank(b"3")) == 3
    for wrong in (b"-1", b"one", b"", "²".encode()):
        with pytest.raises(UserInputError, match="is no rank"):
            header_data_parallel_rank(_with_rank(wrong))
