"""Disks that fail beneath Python: calls cut by a preloaded library, full file systems, limits."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.v1.kv_offload.folder_engine import Engine

pytestmark = pytest.mark.slow

_SOURCE = Path(__file__).with_name("faults.c")
# Writes ten objects, lets calls fail, goes on, and says what was acknowledged.
_CHILD = """
import ctypes, json, sys
from pathlib import Path
from tests.v1.kv_offload.folder_engine import Engine
root, faults = Path(sys.argv[1]), json.loads(sys.argv[2])
engine = Engine(root)
told = {"before": [n for n in range(10) if engine.write(n)], "rounds": []}
for name, nth, code, torn in faults:
    ctypes.CDLL(None).fail_calls(name.encode(), nth, code, torn)
    round = {"kept": [], "failed": [], "unread": 0}
    for number in range(len(told["rounds"]) * 20 + 20, len(told["rounds"]) * 20 + 40):
        try:
            (round["kept"] if engine.write(number) else round["failed"]).append(number)
        except OSError as error:
            round["failed"].append(number)
            round["code"] = error.errno
    try:
        round["right"] = engine.count_right()
    except OSError as error:
        round["unread"] = error.errno
    round["writable"] = engine.store.state.is_writable
    round["evicted"] = engine.store.counts.evicted
    round["faults"] = engine.store.content.find_faults()
    told["rounds"].append(round)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "faults.so"
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(path), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return path


def run_child(root: Path, faults: list[list[Any]], **changes: Any) -> dict[str, Any]:
    command = [sys.executable, "-c", _CHILD, str(root), json.dumps(faults)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **changes)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def read_again(root: Path) -> list[int]:
    """Open the folder in this process, where nothing fails; nothing damaged may be found."""
    engine = Engine(root)
    found = [entry.position for entry in engine.store.content.list_objects()]
    assert engine.count_right() == len(found)
    assert engine.store.counts.damaged_cells == 0
    engine.close()
    return found


@pytest.mark.parametrize(
    ("name", "code", "torn"),
    [
        ("write", errno.EIO, 0),
        ("write", errno.ENOSPC, 1),
        ("write", errno.EDQUOT, 0),
        ("sync", errno.EIO, 0),
        ("allocate", errno.ENOSPC, 0),
        ("read", errno.EIO, 0),
    ],
)
def test_whatever_fails_what_was_said_is_there(library, tmp_path, name, code, torn):
    root = tmp_path / "cache"
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    # The third call of a kind fails and all after it; then the disk is well again.
    told = run_child(root, [[name, 3, code, torn], ["none", 1, 0, 0]], env=environment)
    assert told["before"] == list(range(10))
    during, after = told["rounds"]
    assert during["faults"] == after["faults"] == []
    if name == "allocate":
        # What is there already is what there is: it turns over.
        assert during["kept"]
        assert after["kept"]
    elif name == "read":
        assert during["unread"] == code
        assert after["right"] == 10 + 40
    else:
        assert during["failed"]
        assert len(during["kept"]) <= 2
        # One that failed twice within a minute is written no more in this life.
        assert after["writable"] == bool(after["kept"])
    found = read_again(root)
    said = {*told["before"], *during["kept"], *after["kept"]}
    assert set(found) <= said
    # A disk that cannot grow turns over: the oldest went, and no other.
    gone = said - set(found)
    assert len(gone) <= after["evicted"]
    assert max(gone, default=-1) < min(found)
    # A new life writes again.
    engine = Engine(root)
    assert engine.write(500)
    engine.close()


def test_limits_of_the_process(tmp_path):
    root = tmp_path / "cache"

    def limit() -> None:
        # Files of at most 1 MiB; a larger one is an error, not the end.
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    command = [sys.executable, "-c", _CHILD, str(root), "[]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    kept = json.loads(done.stdout)["before"]
    assert 0 < len(kept) <= 10
    assert set(read_again(root)) <= set(kept)
    for path in root.rglob("*"):
        assert path.is_dir() or path.stat().st_size <= 1 << 20


def test_a_file_system_that_fills(tmp_path):
    """4 MiB for a limit of a TiB, and another's file takes some: the rest is kept, and right."""
    mount = "mount -t tmpfs -o size=4m,mode=700 none " + str(tmp_path / "disk")
    script = f'{mount} && exec {sys.executable} -c "$CHILD" {tmp_path / "disk" / "cache"} "$FAULTS"'
    (tmp_path / "disk").mkdir()
    environment = {**os.environ, "CHILD": _CHILD_FULL, "FAULTS": "[]"}
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("this kernel lets no user mount a file system")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["kept"] > 10
    assert told["evicted"] > 0
    assert told["right"] == told["found"] > 5
    assert told["bytes"] <= 3 << 20 < told["limit"] <= 5 << 20
    assert told["notes"] == 1


_CHILD_FULL = """
import json, sys
from pathlib import Path
from tests.v1.kv_offload.folder_engine import Engine
from vllm.v1.kv_offload.store.folder import disk_bytes
root = Path(sys.argv[1])
engine = Engine(root, limit=1 << 40)
root.with_name("another's").write_bytes(bytes(1 << 20))
kept = sum(engine.write(number) for number in range(60))
print(json.dumps({
    "kept": kept, "right": engine.count_right(), "found": len(engine.store.content.list_objects()),
    "evicted": engine.store.counts.evicted, "bytes": disk_bytes(root),
    "limit": engine.folder.max_bytes, "notes": len(engine.folder.notes),
}))
"""
