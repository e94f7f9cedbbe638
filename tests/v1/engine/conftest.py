import pytest

from tests.v1.engine.fakes import make_config


@pytest.fixture
def config(tmp_path):
    """Make configurations for fake cores: ``config(step_s=0.01, ...)``."""
    return lambda **fake: make_config(tmp_path, **fake)


@pytest.fixture(autouse=True)
def checked_invariants(monkeypatch):
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
