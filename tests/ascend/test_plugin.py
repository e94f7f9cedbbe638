"""Which platform the entry point names."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from vllm.exceptions import ConfigError
from vllm.platforms.resolve import PLUGIN_GROUP, choose_platform_path, load_platform
from vllm_ascend import plugin
from vllm_ascend.envs import REFERENCE_VARIABLE
from vllm_ascend.platform import NPUPlatform, ReferencePlatform

ROOT = Path(__file__).parents[2]


def entry_point() -> EntryPoint:
    """The entry point as pyproject.toml declares it, installed or not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"][PLUGIN_GROUP].items()
    return EntryPoint(name, value, PLUGIN_GROUP)


def fake_torch_npu(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "torch_npu.py").write_text(body)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)


@pytest.fixture(autouse=True)
def _no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REFERENCE_VARIABLE, raising=False)


def test_without_torch_npu_there_is_no_npu() -> None:
    assert plugin.find_platform() is None
    assert choose_platform_path([entry_point()], lambda: False).endswith("CpuPlatform")


def test_asking_loads_neither_torch_nor_the_tree() -> None:
    code = (
        "import sys; from vllm_ascend.plugin import find_platform; assert find_platform() is None;"
        "assert 'torch' not in sys.modules;"
        "assert not any(m.startswith('vllm_ascend.') and m.split('.')[1] not in"
        " ('plugin', 'envs') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_reference_mode_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REFERENCE_VARIABLE, "1")
    path = choose_platform_path([entry_point()], lambda: True)
    platform = load_platform(path)
    assert isinstance(platform, ReferencePlatform)
    assert platform.device_type == "cpu"
    monkeypatch.setenv(REFERENCE_VARIABLE, "perhaps")
    with pytest.raises(ConfigError, match=REFERENCE_VARIABLE):
        plugin.find_platform()


def test_a_working_torch_npu_is_the_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch_npu(tmp_path, "", monkeypatch)
    platform = load_platform(choose_platform_path([entry_point()], lambda: True))
    assert isinstance(platform, NPUPlatform)


@pytest.mark.parametrize(
    "body",
    [
        "raise ImportError('libhccl.so: cannot open shared object file\\nmore')",
        "raise OSError('libascendcl.so')",
        "raise RuntimeError('Failed to load the backend extension')",
    ],
)
def test_a_half_installed_torch_npu_is_one_line(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch_npu(tmp_path, body, monkeypatch)
    lines: list[str] = []
    monkeypatch.setattr(plugin.logger, "warning", lambda text, *args: lines.append(text % args))
    assert choose_platform_path([entry_point()], lambda: False).endswith("CpuPlatform")
    (line,) = lines
    assert "\n" not in line
    assert "CANN" in line
