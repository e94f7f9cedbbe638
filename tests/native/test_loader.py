"""A library that cannot be used is told in words, and never loaded half."""

import shutil
import struct
from pathlib import Path

import pytest

from vllm.entrypoints.cli.collect_env import make_report
from vllm.native import loader
from vllm.native.prefix_hash import find_hash_chain
from vllm.utils.hashing import sha256

BUILT = Path(loader.__file__).parent / loader.LIBRARY_NAME
needs_library = pytest.mark.skipif(loader.load_library() is None, reason="the library is not built")


def elf(*segments: tuple[int, int]) -> bytes:
    """Returns the head of a library of some (offset, bytes) in its file."""
    head = bytearray(64 + 56 * len(segments))
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 32, 64)
    struct.pack_into("<HH", head, 54, 56, len(segments))
    for index, (offset, size) in enumerate(segments):
        struct.pack_into("<8xQ16xQ", head, 64 + 56 * index, offset, size)
    return bytes(head)


def open_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VLLM_NATIVE_LIBRARY", str(path))
    found = loader.open_library()
    assert isinstance(found, str)
    assert loader.load_library() is None
    assert find_hash_chain(sha256, 16) is None
    assert f"Native   off ({found}): models run on torch\n" in make_report()
    return found


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "file too short"),
        (b"no library at all" * 10, "invalid ELF header"),
        (elf((0, 120)), "cannot be loaded"),
        (elf((0, 120), (4096, 10)), "lacks its end: make native"),
        (elf((0, 176))[:100], "lacks its end: make native"),
    ],
)
def test_files_that_are_no_library(
    content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / loader.LIBRARY_NAME
    path.write_bytes(content)
    assert reason in open_file(path, monkeypatch)


def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No such file" in open_file(tmp_path / "absent.so", monkeypatch)
    assert "cannot be loaded" in open_file(tmp_path, monkeypatch)


@needs_library
# What is mapped may be less than a third of the file; symbols follow.
@pytest.mark.parametrize("share", [0.01, 0.1, 0.25])
def test_a_library_that_was_cut_off(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / loader.LIBRARY_NAME
    whole = BUILT.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert "lacks its end" in open_file(path, monkeypatch)


@needs_library
def test_a_library_of_another_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / loader.LIBRARY_NAME
    shutil.copy(BUILT, path)
    with path.open("r+b") as file:
        file.seek(18)
        file.write(struct.pack("<H", 0x1234))  # the machine it is for
    assert "cannot be loaded" in open_file(path, monkeypatch)


@needs_library
def test_a_library_of_another_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / loader.LIBRARY_NAME
    shutil.copy(BUILT, path)
    monkeypatch.setattr(loader, "ABI_VERSION", 10_000)
    assert "this source needs 10000: make native" in open_file(path, monkeypatch)


@needs_library
def test_a_library_that_fits_names_its_vector_build() -> None:
    library = loader.load_library()
    assert library is not None
    assert loader.find_vector_build(library) in (
        "amx",
        "vbmi",
        "vnni",
        "avx512",
        "avx2",
        "portable",
    )
    assert f"Native   {loader.find_vector_build(library)} build\n" in make_report()
