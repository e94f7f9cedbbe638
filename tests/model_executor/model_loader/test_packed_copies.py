"""Packed matrices in files: every type's bits, whatever happens to the file, who writes it."""

import fcntl
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm.model_executor.layers.quantization.gguf_blocks import BLOCK_FORMS, read_blocks
from vllm.model_executor.layers.quantization.panels import PackedRows
from vllm.model_executor.model_loader.packed_copies import PackedCopies
from vllm.native.packing import find_block_packer

Named = list[tuple[str, PackedRows]]


def pack(name: str, num_rows: int = 70, num_blocks: int = 3) -> PackedRows:
    form = BLOCK_FORMS[name]
    rng = np.random.default_rng(len(name))
    blocks = rng.integers(0, 64, (num_rows, num_blocks * form.num_bytes), dtype=np.uint8)
    return PackedRows(read_blocks(name, torch.from_numpy(blocks), find_block_packer(1)), name)


def open_copies(folder: Path, maker: str = "maker", checkpoint: str = "digest") -> PackedCopies:
    return PackedCopies(folder, checkpoint, maker, 2)


def has_all(copies: PackedCopies, named: Named) -> bool:
    copies.check(name for name, _ in named)
    return all(copies.has(name, own.num_rows, own.num_columns) for name, own in named)


def list_files(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


@pytest.fixture
def named() -> Named:
    return [("a.weight", pack("Q4_K")), ("layers.0.experts.1.up", pack("IQ2_XXS"))]


@pytest.fixture
def path(tmp_path: Path, named: Named) -> Path:
    open_copies(tmp_path).write(named)
    (written,) = tmp_path.glob("*.panels")
    return written


def test_every_type_comes_back_with_its_bits(tmp_path: Path) -> None:
    named = [(f"x.{name}", pack(name)) for name in BLOCK_FORMS]
    ordered = pack("Q8_0")
    ordered.order = torch.randperm(ordered.num_columns).int()
    named.append(("z", ordered))
    open_copies(tmp_path).write(named)
    copies = open_copies(tmp_path)
    copies.check(name for name, _ in named)
    for name, packed in named:
        assert copies.has(name, packed.num_rows, packed.num_columns)
        found = copies.read(name, "bytes by group")
        assert found.inputs == "bytes by group"
        assert found.nbytes == packed.nbytes
        assert torch.equal(found.codes, packed.codes)
        values = torch.empty(2, packed.num_rows, packed.num_columns)
        for own, out in zip((found, packed), values, strict=True):
            own.write_rows(0, out)
        assert torch.equal(*values)
    assert not copies.has("x.Q4_0", 70, 95)
    assert not copies.has("w", 70, 96)
    kept = sum(packed.nbytes for _, packed in named)
    (written,) = tmp_path.glob("*.panels")
    # What tensors share is there once, beside the index.
    assert kept < written.stat().st_size < kept + 800 * len(named)


def test_matrices_stay_in_the_file(path: Path, named: Named) -> None:
    copies = open_copies(path.parent)
    copies.check(name for name, _ in named)
    for name, _ in named:
        at = copies.read(name, "whole").codes.data_ptr()
        lines = Path("/proc/self/maps").read_text().splitlines()
        bounds = [[int(bound, 16) for bound in line.split()[0].split("-")] for line in lines]
        (own,) = (line for line, (low, high) in zip(lines, bounds, strict=True) if low <= at < high)
        assert own.endswith(path.name)


def test_damage_and_cuts_are_found_out_and_mended(path: Path, named: Named) -> None:
    whole = path.read_bytes()
    damaged = [whole[:size] for size in (0, 47, 48, 4096, len(whole) // 2, len(whole) - 1)]
    for at in (0, 700, len(whole) // 2, len(whole) - 200, len(whole) - 30, len(whole) - 1):
        flipped = bytearray(whole)
        flipped[at] ^= 4
        damaged.append(bytes(flipped))
    damaged.append(whole + b"\0")
    for data in damaged:
        path.write_bytes(data)
        copies = open_copies(path.parent)
        copies.check(name for name, _ in named)
        assert not any(copies.has(name, own.num_rows, own.num_columns) for name, own in named)
        assert not path.exists()
        copies.write(named)
        assert path.read_bytes() == whole
    assert has_all(open_copies(path.parent), named)


def test_a_copy_is_of_one_checkpoint_and_of_one_way_of_packing(path: Path, named: Named) -> None:
    folder = path.parent
    assert not has_all(open_copies(folder, checkpoint="other"), named)
    newer = open_copies(folder, maker="newer")
    assert not has_all(newer, named)
    open_copies(folder, checkpoint="other").write(named)
    newer.write(named)
    # What another version packed of the same checkpoint is of no use any more.
    assert not path.exists()
    assert has_all(open_copies(folder, maker="newer"), named)
    assert has_all(open_copies(folder, checkpoint="other"), named)


def test_what_is_needed_besides_gets_a_file_of_its_own(path: Path, named: Named) -> None:
    before = path.stat()
    more = [("mtp.0.w", pack("Q8_0"))]
    copies = open_copies(path.parent)
    assert has_all(copies, named)
    assert not has_all(copies, more)
    copies.write(more)
    assert has_all(open_copies(path.parent), [*named, *more])
    assert path.stat() == before


def test_bytes_that_nobody_asks_for_are_not_read(path: Path, named: Named) -> None:
    more = [("mtp.0.w", pack("Q8_0")), ("mtp.0.v", pack("Q4_0"))]
    open_copies(path.parent).write(more)
    (other,) = set(path.parent.iterdir()) - {path}
    data = bytearray(other.read_bytes())
    data[700] ^= 4
    other.write_bytes(data)
    copies = open_copies(path.parent)
    # Nothing is there before it was checked.
    assert not copies.has(named[0][0], 70, named[0][1].num_columns)
    assert has_all(copies, named)
    assert other.exists()
    # A file is sound as a whole or is of no use, though the second of its matrices is.
    assert not any(has_all(copies, [own]) for own in more)
    assert not other.exists()
    assert has_all(copies, named)


def test_what_killed_servers_left_is_removed(path: Path, named: Named) -> None:
    killed, busy, foreign = (
        path.with_name(f"{stem}.part") for stem in ("digest-older-1", "digest-maker-2", "other-1")
    )
    for part in (killed, busy, foreign):
        part.write_bytes(b"the start")
    with busy.open("r+b") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        open_copies(path.parent).write([("more", pack("Q8_0"))])
    assert not killed.exists()
    assert busy.exists()
    assert foreign.exists()


def test_of_two_that_write_at_once_one_does(tmp_path: Path, named: Named) -> None:
    first, second = open_copies(tmp_path), open_copies(tmp_path)
    first.write(named)
    (path,) = tmp_path.iterdir()
    part = path.with_suffix(".part")
    path.unlink()
    # Another one is at it.
    handle = os.open(part, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    second.write(named)
    assert list_files(tmp_path) == [".part"]
    # It was killed: what it left is written over.
    os.write(handle, b"the start of a file" * 100_000)
    os.close(handle)
    second.write(named)
    assert list_files(tmp_path) == [".panels"]
    before = path.stat()
    # One that comes when all is written leaves it alone.
    first.write(named)
    assert path.stat() == before
    assert has_all(open_copies(tmp_path), named)


def test_without_room_or_rights_nothing_is_left_behind(
    tmp_path: Path, named: Named, caplog: pytest.LogCaptureFixture
) -> None:
    copies = open_copies(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        copies.write(named)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list_files(tmp_path) == []
    gone = tmp_path / "gone"
    open_copies(gone).write(named)
    told = [record.getMessage() for record in caplog.records]
    assert sum("the next start packs them again" in message for message in told) == 2


def test_a_copy_that_cannot_be_read_now_is_left(
    path: Path, named: Named, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = path.read_bytes()
    user = os.geteuid()
    with monkeypatch.context() as patched:
        # Another user's is not trusted.
        patched.setattr(os, "geteuid", lambda: user + 1)
        assert not has_all(open_copies(path.parent), named)
    assert "is not used" in caplog.text
    assert path.read_bytes() == before
    assert has_all(open_copies(path.parent), named)


def test_what_stands_in_the_place_of_a_file_is_left_alone(
    tmp_path: Path, path: Path, named: Named, caplog: pytest.LogCaptureFixture
) -> None:
    target, part = tmp_path / "target", path.with_suffix(".part")
    target.write_bytes(b"precious")
    path.unlink()
    for make in (lambda own: own.symlink_to(target), os.mkfifo):
        make(part)
        make(path)
        copies = open_copies(path.parent)
        path.unlink()
        copies.write(named)
        assert not path.exists()
        part.unlink()
    assert target.read_bytes() == b"precious"
    assert caplog.text.count("the next start packs them again") == 2
