"""Choice of the platform."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from vllm.exceptions import ConfigError
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.resolve import (
    CPU_PATH,
    CUDA_PATH,
    PLUGIN_GROUP,
    choose_platform_path,
    is_cuda_available,
    load_platform,
)

HERE = __name__


class PluggedPlatform(CpuPlatform):
    """What the fake plug-ins below name."""


def find_device() -> str:
    return f"{HERE}.PluggedPlatform"


def find_other_device() -> str:
    return f"{HERE}.OtherPlatform"


def find_nothing() -> None:
    return None


def find_rubbish() -> int:
    return 7


def plugin(name: str, function: str, module: str = HERE) -> EntryPoint:
    return EntryPoint(name, f"{module}:{function}", PLUGIN_GROUP)


def never() -> bool:
    return False


def test_without_plugins_cuda_then_cpu() -> None:
    assert choose_platform_path([], never) == CPU_PATH
    assert choose_platform_path([], lambda: True) == CUDA_PATH


def test_an_active_plugin_wins_and_absent_ones_stay_out() -> None:
    plugins = [plugin("absent", "find_nothing"), plugin("mine", "find_device")]
    path = choose_platform_path(plugins, lambda: True)
    assert isinstance(load_platform(path), PluggedPlatform)
    assert choose_platform_path(plugins[:1], never) == CPU_PATH


def test_two_active_plugins_are_refused_by_name() -> None:
    plugins = [plugin("mine", "find_device"), plugin("yours", "find_other_device")]
    with pytest.raises(ConfigError, match=r"mine .*PluggedPlatform.*yours .*OtherPlatform"):
        choose_platform_path(plugins, never)


def test_a_plugin_that_cannot_be_imported_is_skipped_with_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = plugin("broken", "find", "vllm_no_such_module")
    with caplog.at_level("WARNING", logger="vllm"):
        assert choose_platform_path([broken], never) == CPU_PATH
    assert "broken" in caplog.text


def test_a_plugin_must_return_a_path() -> None:
    with pytest.raises(ConfigError, match=r"rubbish returned 7"):
        choose_platform_path([plugin("rubbish", "find_rubbish")], never)


@pytest.mark.parametrize(
    "path", ["nothing", "vllm.platforms.cpu.Missing", "no_such.Thing", "vllm.envs.Any"]
)
def test_a_path_must_name_a_platform(path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        load_platform(path)


@pytest.mark.slow
def test_importing_platforms_and_asking_for_the_current_one_load_no_torch() -> None:
    if is_cuda_available():
        pytest.skip("a CUDA platform needs torch")
    code = (
        "import sys, vllm.platforms as p; assert 'torch' not in sys.modules;"
        "q = p.current_platform; assert q is p.current_platform;"
        "print(q.device_type, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cpu", "False"]
