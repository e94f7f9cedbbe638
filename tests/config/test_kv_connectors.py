"""Finding KV connectors by name, without their modules being known here."""

import subprocess
import sys

import pytest

from tests.config.test_vllm import AllGroupsConnector, OneGroupConnector
from vllm.config.kv_connectors import KVConnectorRegistry
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
from vllm.exceptions import ConfigError


@pytest.mark.parametrize("connector", [AllGroupsConnector, OneGroupConnector])
def test_the_verb_and_the_marker_agree(connector: type) -> None:
    config = KVTransferConfig(connector.__name__, kv_connector_module_path=connector.__module__)
    assert KVConnectorRegistry.load_class(config) is connector
    assert KVConnectorRegistry.handles_all_groups(config) is supports_hma(connector)


@pytest.mark.parametrize("path", ["no.such.module", ""])
def test_a_module_that_is_not_there_is_named(path: str) -> None:
    config = KVTransferConfig("TcpConnector", kv_connector_module_path=path)
    with pytest.raises(ConfigError, match=f"module '{path}' cannot be imported .*kv_connector_mod"):
        KVConnectorRegistry.load_class(config)


@pytest.mark.slow
def test_config_imports_no_connector() -> None:
    """The table names the built-in one; only asking for it imports it."""
    program = (
        "import sys; from vllm.config import KVTransferConfig, VllmConfig;"
        "assert not any(m.startswith('vllm.distributed') for m in sys.modules);"
        "config = VllmConfig(kv_transfer_config=KVTransferConfig('ExampleConnector'));"
        "print(config.scheduler_config.disable_hybrid_kv_cache_manager)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"
