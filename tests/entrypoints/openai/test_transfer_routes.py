"""Proxies tell a prefill server what it holds in vain."""

from collections.abc import Callable
from typing import Any

import pytest


async def test_held_prompts_are_let_go(serve: Callable[..., Any]) -> None:
    served = serve(served_model={"has_kv_transfer": True})
    body = {"request_ids": ["cmpl-1-ab", "cmpl-2-cd"]}
    assert (await served.client.post("/abort_requests", json=body)).status_code == 200
    assert served.engine.withdrawn == ["cmpl-1-ab", "cmpl-2-cd"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "request_ids"),
        ({"request_ids": "a"}, "request_ids"),
        ({"request_ids": [1]}, "request_ids"),
        ({"request_ids": ["a"] * 1025}, "1025"),
    ],
)
async def test_wrong_bodies_are_refused(
    body: dict[str, Any], named: str, serve: Callable[..., Any]
) -> None:
    served = serve(served_model={"has_kv_transfer": True})
    response = await served.client.post("/abort_requests", json=body)
    assert response.status_code == 400
    assert named in response.text
    assert served.engine.withdrawn == []


async def test_other_servers_hold_nothing(serve: Callable[..., Any]) -> None:
    response = await serve().client.post("/abort_requests", json={"request_ids": ["a"]})
    assert response.status_code == 400
    assert "--kv-transfer-config" in response.json()["error"]["message"]
