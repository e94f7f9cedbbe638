"""The processor's vendor."""

from pathlib import Path

import pytest

from vllm.utils.cpu_vendor import find_cpu_vendor


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel\t: 1\n", "AuthenticAMD"),
        ("processor\t: 0\nCPU implementer\t: 0x48\n", None),
        ("", None),
    ],
)
def test_vendor(tmp_path: Path, text: str, vendor: str | None) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert find_cpu_vendor(path) == vendor


def test_no_description(tmp_path: Path) -> None:
    assert find_cpu_vendor(tmp_path / "missing") is None
