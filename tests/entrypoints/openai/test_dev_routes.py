"""Routes that only ``VLLM_SERVER_DEV_MODE=1`` opens."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def dev(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Any]) -> Callable[..., Any]:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    return serve


@pytest.mark.parametrize("value", [None, "0"])
async def test_they_do_not_exist_without_it(
    value: str | None, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Any]
) -> None:
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_SERVER_DEV_MODE", value)
    served = serve()
    assert (await served.client.post("/reset_prefix_cache")).status_code == 404
    assert (await served.client.get("/server_info")).status_code == 404
    assert served.engine.resets == []
    paths = (await served.client.get("/openapi.json")).json()["paths"]
    assert "/reset_prefix_cache" not in paths


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", (False, False)),
        ("?reset_running_requests=true", (True, False)),
        ("?reset_running_requests=0&reset_external=1", (False, True)),
    ],
)
async def test_reset(query: str, expected: tuple[bool, bool], dev: Callable[..., Any]) -> None:
    served = dev()
    response = await served.client.post(f"/reset_prefix_cache{query}")
    assert (response.status_code, response.json()) == (200, {"success": True})
    assert served.engine.resets == [expected]
    served.engine.can_reset = False
    assert (await served.client.post("/reset_prefix_cache")).json() == {"success": False}


async def test_a_bad_parameter_resets_nothing(dev: Callable[..., Any]) -> None:
    served = dev()
    response = await served.client.post("/reset_prefix_cache?reset_running_requests=maybe")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "reset_running_requests"
    assert served.engine.resets == []


async def test_a_key_guards_them(dev: Callable[..., Any]) -> None:
    served = dev(api_keys=("k",))
    assert (await served.client.post("/reset_prefix_cache")).status_code == 401
    assert (await served.client.get("/server_info")).status_code == 401
    headers = {"Authorization": "Bearer k"}
    response = await served.client.post("/reset_prefix_cache", headers=headers)
    assert response.status_code == 200


async def test_server_info(dev: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    response = await dev().client.get("/server_info")
    assert response.status_code == 200
    assert "sesame" not in response.text
    body = response.json()
    assert body["vllm_config"]["cache_config"]["block_size"] == 16
    assert body["environment"]["VLLM_SERVER_DEV_MODE"] is True
    assert body["environment"]["VLLM_API_KEY"] == "(hidden)"
