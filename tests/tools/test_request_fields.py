"""The table of request fields: the page shows it, and the routes do what it says."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.entrypoints.openai.conftest import Served, serve, tokenizer
from tools.request_fields import BEGIN, END, MODELS, PAGE, make_tables
from vllm.entrypoints.openai.protocol.fields import (
    CHAT,
    COMPLETIONS,
    KNOWN_FIELDS,
    MESSAGES,
    RESPONSES,
    Refused,
    WithoutEffect,
)

__all__ = ["serve", "tokenizer"]

_HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": _HI},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": _HI, "max_tokens": 5},
}
# Of the type that the API gives it, where one is checked.
_VALUES: dict[str, Any] = {"metadata": {"a": "b"}, "store": True}


def test_the_page_shows_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0] == make_tables(), "run python -m tools.request_fields"


def test_no_field_has_two_kinds() -> None:
    for route, model in MODELS.items():
        assert not set(model.model_fields) & set(KNOWN_FIELDS[route])
        assert model.route == route


@pytest.mark.parametrize("route", list(BODIES))
async def test_routes_do_what_the_table_says(serve: Callable[..., Served], route: str) -> None:
    served = serve(served_model={"max_model_len": 2048})
    for name, field in KNOWN_FIELDS[route].items():
        if isinstance(field, WithoutEffect):
            body = {**BODIES[route], name: _VALUES.get(name, "x")}
            answer = await served.client.post(route, json=body)
            assert answer.status_code == 200, (name, answer.text)
            assert answer.headers["x-ignored-fields"] == name
            continue
        assert isinstance(field, Refused)
        answer = await served.client.post(route, json={**BODIES[route], name: {"else": 1}})
        assert answer.status_code == 400, name
        message = answer.json()["error"]["message"]
        assert message.startswith(name)
        assert field.advice in message
        for value in (None, *field.values):
            answer = await served.client.post(route, json={**BODIES[route], name: value})
            assert answer.status_code == 200, (name, value, answer.text)
            assert "x-ignored-fields" not in answer.headers


@pytest.mark.parametrize("route", list(BODIES))
async def test_unknown_fields_are_named(serve: Callable[..., Served], route: str) -> None:
    served = serve(served_model={"max_model_len": 2048})
    answer = await served.client.post(route, json={**BODIES[route], "strange": 1})
    assert answer.headers["x-ignored-fields"] == "strange"


@pytest.mark.parametrize("route", list(BODIES))
async def test_a_cache_key_reaches_the_engine(serve: Callable[..., Served], route: str) -> None:
    served = serve(served_model={"max_model_len": 2048})
    answer = await served.client.post(route, json={**BODIES[route], "prompt_cache_key": "user 7"})
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    assert served.engine.keys == ["user 7"]
