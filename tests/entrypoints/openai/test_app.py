"""The application as a whole."""

from typing import Any

import pytest

from vllm.exceptions import EngineError


async def test_unexpected_errors_tell_nothing(
    served: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served.engine.refuse = RuntimeError("secret")
    response = await served.client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["type"] == "InternalServerError"
    # The server above closes then, and clients must not send their next request into that.
    assert response.headers["connection"] == "close"


async def test_engine_errors_are_500(served: Any) -> None:
    served.engine.refuse = EngineError("broken")
    response = await served.client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert "connection" not in response.headers
