"""The root folder: whose it is, who holds it, what is left untouched, and how large it gets."""

import argparse
import errno
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.v1.kv_offload.folder_engine import LIMIT, OBJECT, Engine, identity_of, key_of
from tests.v1.kv_offload.hostile import make_template, spoil_and_open
from vllm.entrypoints.cli.main import main
from vllm.exceptions import ConfigError
from vllm.utils.byte_sizes import parse_size, show_size
from vllm.v1.kv_offload.inspect import run_clear
from vllm.v1.kv_offload.store.file_calls import DiskFiles
from vllm.v1.kv_offload.store.folder import (
    CacheFolder,
    FolderBusyError,
    FolderError,
    choose_slot_bytes,
    disk_bytes,
    read_marker,
    rows_path,
)
from vllm.v1.kv_offload.store.records import ObjectSpec


@contextmanager
def opened(root: Path, name: str = "a", limit: int = LIMIT) -> Iterator[Engine]:
    engine = Engine(root, name, limit)
    try:
        yield engine
    finally:
        engine.close()


def test_what_was_written_is_there_again(tmp_path):
    root = tmp_path / "cache"
    with opened(root) as engine:
        assert all(engine.write(number) for number in range(5))
        hash_root = engine.folder.hash_root
    with opened(root) as engine:
        assert engine.count_right() == 5
        assert engine.folder.hash_root == hash_root == read_marker(root)
    for path in [root, *root.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0


class FullDisk(DiskFiles):
    def replace(self, path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_who_cannot_begin_a_folder_lets_go_of_it(tmp_path):
    """Else it would be told that it is in use, by itself, and not what is wrong."""
    for _ in range(2):
        with pytest.raises(FolderError, match="No space left"):
            CacheFolder(tmp_path / "cache", LIMIT, files=FullDisk())
    CacheFolder(tmp_path / "cache", LIMIT).close()


@pytest.mark.parametrize("num_cores", [1, 2])
def test_a_folder_that_is_cleared_while_a_server_starts_has_that_servers_root(tmp_path, num_cores):
    """Else nothing of what it keeps would be found by the next one."""
    root = tmp_path / "cache"
    CacheFolder(root, LIMIT).close()
    known = read_marker(root)
    assert run_clear(argparse.Namespace(folder=root)) == 0
    assert read_marker(root) is None
    own = root if num_cores == 1 else root / "core-0"
    CacheFolder(own, LIMIT, num_cores=num_cores, hash_root=known).close()
    assert read_marker(root) == known
    # A root that is there stays.
    CacheFolder(own, LIMIT, num_cores=num_cores, hash_root=bytes(32)).close()
    assert read_marker(root) == known


def test_the_limit_holds_with_several_models_in_turn(tmp_path):
    root = tmp_path / "cache"
    for name in ("a", "b", "a", "c"):
        with opened(root, name) as engine:
            for number in range(120):
                engine.write(number)
                assert disk_bytes(root) <= LIMIT
            assert engine.store.counts.evicted > 0
            assert engine.count_right() > 30
            assert engine.store.content.find_faults() == []


def test_a_smaller_and_a_larger_limit_keep_what_fits(tmp_path):
    root = tmp_path / "cache"
    with opened(root, limit=4 * LIMIT) as engine:
        for number in range(60):
            engine.write(number)
        before = engine.count_right()
    with opened(root, limit=LIMIT) as engine:
        assert 20 < engine.count_right() < before
        assert disk_bytes(root) <= LIMIT
        assert engine.store.content.find_faults() == []
    with opened(root, limit=4 * LIMIT) as engine:
        assert engine.count_right() > 20
        assert engine.write(200)


def test_one_writer_at_a_time(tmp_path):
    root = tmp_path / "cache"
    with opened(root) as engine:
        with pytest.raises(FolderBusyError, match=f"process {os.getpid()}"):
            CacheFolder(root, LIMIT)
        engine.write(1)
        reader = CacheFolder(root, LIMIT, read_only=True)
        store = reader.open_store(identity_of("a"))
        store.opening.load()
        assert len(store.content.list_objects()) == 1
        assert store.reserve([ObjectSpec(key_of(2), 2, OBJECT)]) == [None]
        reader.close()
    CacheFolder(root, LIMIT).close()


def test_another_number_of_cores_goes_on_with_what_the_first_kept(tmp_path):
    root = tmp_path / "cache"

    def cores(number: int) -> list[Engine]:
        share = LIMIT // number
        names = [root] if number == 1 else [root / f"core-{i}" for i in range(number)]
        # The first one last: whoever comes first moves what was left.
        made = [Engine(name, "a", share, number) for name in reversed(names)]
        assert disk_bytes(root) <= LIMIT
        return made[::-1]

    def close(engines: list[Engine]) -> None:
        for engine in engines:
            engine.close()

    engines = cores(1)
    assert all(engines[0].write(number) for number in range(5))
    with pytest.raises(FolderBusyError):
        CacheFolder(root / "core-0", LIMIT)
    close(engines)
    engines = cores(3)
    assert [engine.count_right() for engine in engines] == [5, 0, 0]
    assert all(engines[2].write(number) for number in range(10, 14))
    with pytest.raises(FolderBusyError):
        CacheFolder(root, LIMIT)
    close(engines)
    engines = cores(2)
    assert [engine.count_right() for engine in engines] == [5, 0]
    assert not (root / "core-2").exists()
    assert all(engines[1].write(number) for number in range(100, 115))
    close(engines)
    engines = cores(1)
    assert engines[0].count_right() == 5
    # The second one's goes when its room is needed.
    for number in range(30, 90):
        engines[0].write(number)
        assert disk_bytes(root) <= LIMIT
    assert not (root / "core-1").exists()
    close(engines)


def test_cores_of_two_servers_do_not_share_a_folder(tmp_path):
    """Each would take another share of the limit; together they would exceed it."""
    root = tmp_path / "cache"
    two = [CacheFolder(root / f"core-{i}", LIMIT // 2, num_cores=2) for i in (1, 0)]
    with pytest.raises(FolderBusyError, match=f"process {os.getpid()} on .*, one of 2 cores"):
        CacheFolder(root / "core-2", LIMIT // 4, num_cores=4)
    for folder in two:
        folder.close()
    four = [CacheFolder(root / f"core-{i}", LIMIT // 4, num_cores=4) for i in (3, 2)]
    with pytest.raises(FolderBusyError, match="one of 4 cores"):
        CacheFolder(root / "core-1", LIMIT // 2, num_cores=2)
    four.append(CacheFolder(root / "core-1", LIMIT // 4, num_cores=4))
    for folder in four:
        folder.close()
    CacheFolder(root, LIMIT).close()


@pytest.mark.parametrize("trouble", ["others", "foreign", "link", "file", "newer", "older"])
def test_a_folder_that_is_not_ours_alone_is_left_as_it_is(tmp_path, trouble):
    root = tmp_path / "cache"
    if trouble == "file":
        root.write_text("x")
    elif trouble == "link":
        (tmp_path / "there").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "there")
    else:
        root.mkdir(mode=0o755 if trouble == "others" else 0o700)
    if trouble == "foreign":
        (root / "thesis.txt").write_text("x")
    if trouble in ("newer", "older"):
        CacheFolder(root, LIMIT).close()
        other = b'"format": 2' if trouble == "newer" else b'"format": 0'
        body = (root / "MARKER").read_bytes().split(b" ", 1)[1].replace(b'"format": 1', other)
        import xxhash

        digest = xxhash.xxh3_64_hexdigest(body.rstrip(b"\n")).encode()
        (root / "MARKER").write_bytes(digest + b" " + body)
    before = sorted((p.name, p.lstat().st_size) for p in tmp_path.rglob("*"))
    with pytest.raises(FolderError):
        CacheFolder(root, LIMIT)
    assert sorted((p.name, p.lstat().st_size) for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_something_else_in_a_files_place(tmp_path, kind):
    root = tmp_path / "cache"
    with opened(root) as engine:
        engine.write(1)
    path = rows_path(root / identity_of("a").name, 0)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(root / "MARKER")
    marker = (root / "MARKER").read_bytes()
    with pytest.raises(FolderError):
        Engine(root)
    assert (root / "MARKER").read_bytes() == marker


@pytest.mark.slow
def test_whatever_is_in_a_folder(tmp_path):
    make_template(tmp_path / "template")
    totals = sum((spoil_and_open(tmp_path / "template", tmp_path, n) for n in range(60)), Counter())
    assert totals["refused"] < totals["folders"] == 60
    assert totals["whole"] > 60


def test_a_limit_too_small_is_told(tmp_path):
    folder = CacheFolder(tmp_path / "cache", 1 << 20)
    with pytest.raises(FolderError, match="at least"):
        folder.open_store(identity_of("a"))
    folder.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 << 30),
        ("500MB", 500_000_000),
        ("2g", 2 << 30),
        ("1048576", 1 << 20),
        ("1.5k", 1536),
    ],
)
def test_sizes(text, expected):
    assert parse_size("size", text) == expected
    assert parse_size("size", show_size(expected)) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "8 furlongs", "0", "nan", "inf", "1e400"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match=r"^size=.* is no size"):
        parse_size("size", text)


def test_slots_pad_little():
    for size in (OBJECT, 880_640, 7_500_000, 196_000, 12_000):
        slot = choose_slot_bytes([size])
        assert slot == 4096 or -(-(size + 16) // slot) * slot <= (size + 16) * 1.02


_WRITER = """
import sys
from pathlib import Path
from tests.v1.kv_offload.store.test_folder import Engine
engine = Engine(Path(sys.argv[1]))
number = int(sys.argv[2])
print("ready", flush=True)
while True:
    number += 1
    if engine.write(number):
        alive = ",".join(str(o.position) for o in engine.store.content.list_objects())
        print(number, alive, flush=True)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed(tmp_path):
    """SIGKILL at random moments while it writes and evicts: what it said is there is there."""
    root, rng, number = tmp_path / "cache", random.Random(1), 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(root), str(number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        lines = [process.stdout.readline() for _ in range(rng.randrange(3, 60))]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        process.stdout.close()
        process.wait()
        whole = [line.split(" ") for line in lines if line.endswith("\n")]
        number = int(whole[-1][0])
        # What it evicted after its last word is not known: the oldest may be gone.
        said = {int(n) for n in whole[-1][1].split(",")}
        with opened(root) as engine:
            there = {entry.position for entry in engine.store.content.list_objects()}
            assert number in there
            gone = said - there
            assert len(gone) <= engine.store.shape.max_slots // 64 + 4
            assert all(g <= min(said & there) for g in gone)
            assert engine.count_right() == len(there)
            assert engine.store.counts.damaged_cells == 0


def test_looking_at_a_folder_from_outside(tmp_path, capsys):
    root = tmp_path / "cache"
    with opened(root) as engine:
        for number in range(4):
            engine.write(number)
        assert main(["cache", "ls", str(root)]) == 0
        assert "4 row groups" in capsys.readouterr().out
        assert main(["cache", "verify", str(root)]) == 0
        slot = engine.store.content.list_objects()[2].extent.slots[0][0]
        os.pwrite(engine.handle, b"x", slot * engine.store.shape.slot_bytes + 7)
        with pytest.raises(FolderBusyError):
            run_clear(argparse.Namespace(folder=root))
    capsys.readouterr()
    assert main(["cache", "verify", str(root)]) == 1
    assert "3 objects are whole, 1 are damaged" in capsys.readouterr().out
    assert main(["cache", "clear", str(root)]) == 0
    assert main(["cache", "ls", str(root)]) == 1
    # A name with a slip in it, too, is not a folder that is whole.
    assert main(["cache", "verify", str(root)]) == 1
    assert [path.name for path in root.iterdir()] == ["LOCK"]
    with opened(root) as engine:
        assert engine.store.content.list_objects() == []


@pytest.mark.parametrize("missing", ["rows.0", "index"])
def test_an_identity_without_its_files_hides_no_other(tmp_path, capsys, missing):
    root = tmp_path / "a b\udcff"
    for name, count in (("a", 3), ("b", 2)):
        with opened(root, name) as engine:
            for number in range(count):
                engine.write(number)
    (root / identity_of("a").name / missing).unlink()
    assert main(["cache", "ls", str(root)]) == 0
    out = capsys.readouterr().out
    assert "2 row groups" in out
    assert "damaged, files of" in out
    assert main(["cache", "verify", str(root)]) == 1
    assert "2 objects are whole, 1 are damaged" in capsys.readouterr().out
    # It is no worker's.
    (root / identity_of("b").name / "rows.old").write_text("x")
    assert main(["cache", "verify", str(root)]) == 1
    assert "2 objects are whole, 1 are damaged" in capsys.readouterr().out


class Killed(BaseException):
    """The process ends here."""


def test_a_clear_that_is_killed_is_finished_by_the_next(tmp_path, monkeypatch):
    list_files, unlink, rmdir = Path.iterdir, os.unlink, os.rmdir
    # A folder's order is the file system's.
    monkeypatch.setattr(
        Path,
        "iterdir",
        lambda self: iter(sorted(list_files(self), key=lambda entry: entry.name != "MARKER")),
    )
    left = 0

    def die_in_time(call):
        def act(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return call(*args, **kwargs)

        return act

    monkeypatch.setattr(os, "unlink", die_in_time(unlink))
    monkeypatch.setattr(os, "rmdir", die_in_time(rmdir))
    args = argparse.Namespace(folder=tmp_path / "cache")
    for deaths in range(20):
        left = 1000
        with opened(args.folder) as engine:
            engine.write(deaths)
        left = deaths
        try:
            assert run_clear(args) == 0
        except Killed:
            left = 1000
            assert run_clear(args) == 0
        else:
            break
        assert [path.name for path in list_files(args.folder)] == ["LOCK"]
    assert 3 <= deaths < 19


def test_what_is_not_ours_stays_where_a_folder_is_cleared(tmp_path, capsys):
    with opened(tmp_path / "cache") as engine:
        engine.write(1)
    (tmp_path / "cache" / "thesis.txt").write_text("x")
    assert main(["cache", "clear", str(tmp_path / "cache")]) == 0
    assert "thesis.txt" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert names == ["LOCK", "thesis.txt"]


@pytest.mark.parametrize("command", ["ls", "verify", "clear"])
def test_a_folder_that_may_not_be_read_is_told(tmp_path, capsys, monkeypatch, command):
    with opened(tmp_path / "cache"):
        pass

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert main(["cache", command, str(tmp_path / "cache")]) == 1
    assert "run this as the user whose folder it is" in capsys.readouterr().err


def test_a_link_that_leads_nowhere_is_no_folder_to_be_made(tmp_path):
    (tmp_path / "cache").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FolderError, match="not a link"):
        CacheFolder(tmp_path / "cache", LIMIT)
