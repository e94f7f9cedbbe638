"""Settings of how the server is run."""

from pathlib import Path
from typing import Any

import pytest

from vllm.entrypoints.openai.operations_args import OperationsArgs, TlsArgs
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.exceptions import ConfigError


@pytest.fixture
def pem(tmp_path: Path) -> str:
    """Some file."""
    path = tmp_path / "some.pem"
    path.write_text("x")
    return str(path)


def test_tls_is_off_by_default(pem: str) -> None:
    assert not OperationsArgs().tls.is_on
    assert TlsArgs(certfile=pem).is_on


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"certfile": "/no/such.pem"}, "--ssl-certfile /no/such.pem"),
        ({"certfile": "PEM", "keyfile": "/no/such.pem"}, "--ssl-keyfile"),
        ({"keyfile": "PEM"}, "give --ssl-certfile"),
        ({"refresh": True}, "give --ssl-certfile"),
        ({"certfile": "PEM", "cert_reqs": 3}, "0, 1 or 2"),
        ({"certfile": "PEM", "cert_reqs": 2}, "needs --ssl-ca-certs"),
    ],
)
def test_wrong_tls_is_told(wrong: dict[str, Any], text: str, pem: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TlsArgs(**{name: pem if value == "PEM" else value for name, value in wrong.items()})


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"root_path": "api"}, "begin with /"),
        ({"root_path": "/api/"}, "begin with /"),
        ({"keep_alive_s": -1.0}, "at least 0"),
        ({"keep_alive_s": float("nan")}, "at least 0"),
    ],
)
def test_wrong_settings_are_told(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        OperationsArgs(**wrong)


def test_metrics_cannot_be_guarded_without_a_key() -> None:
    with pytest.raises(ConfigError, match="needs --api-key"):
        ServerArgs(operations=OperationsArgs(guards_metrics=True))
    with pytest.raises(ConfigError, match="admin-api-key is one of"):
        ServerArgs(api_keys=("k",), operations=OperationsArgs(admin_key="k"))
    with pytest.raises(ConfigError, match="admin-api-key is empty"):
        OperationsArgs(admin_key="")
    ServerArgs(api_keys=("k",), operations=OperationsArgs(guards_metrics=True))
