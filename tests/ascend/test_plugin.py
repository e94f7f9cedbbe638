"""Which platform the entry point names."""

import logging
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from vllm.exceptions import ConfigError
from vllm.platforms.resolve import PLUGIN_GROUP, choose_platform_path, load_platform
from vllm_ascend import plugin
from vllm_ascend.envs import COMPRESSED_BLOCK_VARIABLE, REFERENCE_VARIABLE
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
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # the plug-in sets it: given back
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
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False)
    assert run.returncode == 0


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


# What a user starts, as far as it matters: the platform is asked for, then torch is imported.
CHOOSE = """
from vllm.logger import setup_logging
setup_logging()
from vllm.platforms.resolve import PLUGIN_GROUP, choose_platform_path, load_platform
from importlib.metadata import EntryPoint
plugin = EntryPoint("ascend", "vllm_ascend.plugin:find_platform", PLUGIN_GROUP)
print(type(load_platform(choose_platform_path([plugin], lambda: False))).__name__)
# The engine core, which this process starts, asks again.
import subprocess, sys
code = "from vllm_ascend.plugin import find_platform; find_platform()"
subprocess.run([sys.executable, "-c", code], check=True)
"""
COMPUTE = "import torch; print(torch.ones(2).sum().item())"


def run_beside(package: str, code: str, folder: Path, **variables: str) -> tuple[str, str, int]:
    """Run code in a process of its own beside a torch_npu, with torch's hook that loads it.

    Returns:
        What it printed and logged, and its exit status.
    """
    (folder / "torch_npu.py").write_text(package)
    hook = folder / "torch_npu-0.dist-info"
    hook.mkdir(exist_ok=True)
    (hook / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 0\n")
    (hook / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:autoload\n")
    environment = {**os.environ, **variables}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout, done.stderr, done.returncode


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "raise ImportError('libhccl.so: cannot open shared object file\\nmore')",
        "raise OSError('libascendcl.so')",
        "raise RuntimeError('Failed to load the backend extension')",
    ],
)
def test_a_half_installed_torch_npu_is_one_line(body: str, tmp_path: Path) -> None:
    printed, logged, _ = run_beside(body, CHOOSE, tmp_path)
    assert printed == "CpuPlatform\n"
    (line,) = logged.splitlines()
    assert "torch_npu is installed but cannot be imported" in line
    assert "CANN" in line


@pytest.mark.slow
@pytest.mark.parametrize("is_reference", [False, True])
def test_torch_loads_beside_a_half_installed_torch_npu(is_reference: bool, tmp_path: Path) -> None:
    body = "raise ImportError('libhccl.so')"
    printed, logged, _ = run_beside(
        body, CHOOSE + COMPUTE, tmp_path, **{REFERENCE_VARIABLE: str(int(is_reference))}
    )
    assert printed == f"{'ReferencePlatform' if is_reference else 'CpuPlatform'}\n2.0\n"
    assert len(logged.splitlines()) == (0 if is_reference else 1), logged
    if not is_reference:
        # The hook is real: without the plug-in torch cannot be imported.
        assert run_beside(body, COMPUTE, tmp_path)[2] == 1


def test_a_torch_npu_that_failed_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not by this process, nor by those it starts, which inherit its environment."""
    tries = tmp_path / "tries"
    body = f"with open({str(tries)!r}, 'a') as f: f.write('x')\nraise OSError('libascendcl.so')"
    fake_torch_npu(tmp_path, body, monkeypatch)
    monkeypatch.setenv(plugin._UNUSABLE, "")
    with caplog.at_level("WARNING"):
        assert plugin.find_platform() is None
        assert plugin.find_platform() is None
    assert tries.read_text() == "x"
    assert os.environ[plugin._UNUSABLE]
    code = "from vllm_ascend.plugin import find_platform; assert find_platform() is None"
    search = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": search}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment, timeout=60)
    assert tries.read_text() == "x"
    monkeypatch.setenv(plugin._UNUSABLE, "")
    assert plugin.find_platform() is None
    assert tries.read_text() == "xx", "the variable alone says that it was tried"


def test_variables_without_effect_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(COMPRESSED_BLOCK_VARIABLE, "64")
    monkeypatch.setenv(plugin._TOLD, "")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level("WARNING"):
        assert plugin.find_platform() is None
        assert plugin.find_platform() is None
    (record,) = caplog.records
    assert f"{COMPRESSED_BLOCK_VARIABLE}=64 has no effect" in record.getMessage()
    caplog.clear()
    monkeypatch.setenv(plugin._TOLD, "")
    monkeypatch.setenv(REFERENCE_VARIABLE, "1")
    assert plugin.find_platform() == plugin.REFERENCE_PATH
    assert not caplog.records
