"""A KV pool that cannot work is refused before weights load.

Every way to give a size: ``tests/v1/engine/test_kv_cache_setup.py``.
"""

from pathlib import Path

import pytest

from tests.e2e.server_process import ServerProcess

# What the log says once weights are in.
LOADED = "Loaded 308 tensors"


@pytest.mark.parametrize(
    ("flags", "space_gib", "message"),
    [
        (("--num-gpu-blocks-override", "20"), "0.03", "20 usable blocks|max seq len"),
        ((), "1000000", "does not fit in the device's memory"),
    ],
)
def test_refused(flags: tuple[str, ...], space_gib: str, message: str, tmp_path: Path) -> None:
    environment = {"VLLM_CPU_KVCACHE_SPACE": space_gib}
    server = ServerProcess(tmp_path / "log.txt", *flags, environment=environment)
    try:
        assert server.process.wait(240) == 2
    finally:
        server.stop()
    assert any(part in server.log for part in message.split("|"))
    assert "Traceback" not in server.log
    assert LOADED not in server.log


@pytest.mark.parametrize("platform", ["cpu"], indirect=True)
def test_a_pool_that_fits_is_served(server: ServerProcess) -> None:
    assert LOADED in server.log
