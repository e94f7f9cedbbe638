"""Folders as accidents and strangers leave them: whatever is in them, a start succeeds.

    python -m tests.v1.kv_offload.hostile [--folders 10000] [--first 0]

A folder of known objects is spoiled in one to three ways and opened again, as an engine would, of
the same identity or of another. Stops at the first fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from tests.v1.kv_offload.folder_engine import LIMIT, Engine
from vllm.v1.kv_offload.store.folder import FolderError, disk_bytes

NUM_OBJECTS = 10


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def _replace(rng: random.Random, root: Path) -> None:
    victim = rng.choice(_files(root))
    victim.write_bytes(rng.randbytes(victim.stat().st_size % (1 << 20)))


def _truncate(rng: random.Random, root: Path) -> None:
    victim = rng.choice(_files(root))
    os.truncate(victim, rng.randrange(victim.stat().st_size + 1))


def _flip(rng: random.Random, root: Path) -> None:
    victim = rng.choice([path for path in _files(root) if path.stat().st_size])
    with victim.open("r+b") as file:
        for _ in range(rng.randrange(1, 12)):
            at = rng.randrange(victim.stat().st_size)
            file.seek(at)
            old = file.read(1)[0]
            file.seek(at)
            file.write(bytes([old ^ 1 << rng.randrange(8)]))


def _grow(rng: random.Random, root: Path) -> None:
    victim = rng.choice(_files(root))
    with victim.open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 9000)))


def _remove(rng: random.Random, root: Path) -> None:
    rng.choice(_files(root)).unlink()


def _swap(rng: random.Random, root: Path) -> None:
    """Two parts of the rows, or of the index, change places."""
    victims = [path for path in _files(root) if path.name in ("rows.0", "index")]
    victims = [path for path in victims if path.stat().st_size >= 2 * 4096]
    if not victims:
        return
    victim = rng.choice(victims)
    pages = victim.stat().st_size // 4096
    first, second = rng.randrange(pages), rng.randrange(pages)
    with victim.open("r+b") as file:
        parts = []
        for page in (first, second):
            file.seek(page * 4096)
            parts.append(file.read(4096))
        for page, part in zip((second, first), parts, strict=True):
            file.seek(page * 4096)
            file.write(part)


def _rename(rng: random.Random, root: Path) -> None:
    """One engine's folder under the name of another; a file under another's name."""
    folders = [path for path in root.iterdir() if path.is_dir()]
    if folders and rng.random() < 0.5:
        rng.choice(folders).rename(root / f"{rng.randrange(1 << 64):016x}")
        return
    files = _files(root)
    first, second = rng.choice(files), rng.choice(files)
    if first != second:
        first.replace(second)


def _plant(rng: random.Random, root: Path) -> None:
    """Something that is no part of a prefix cache."""
    path = rng.choice([root, *(entry for entry in root.iterdir() if entry.is_dir())])
    made = path / rng.choice(["notes.txt", "rows.1", "index.new", "core-7", "damaged-0-meta"])
    if not made.exists():
        made.write_bytes(rng.randbytes(rng.randrange(2000)))


def _misplace(rng: random.Random, root: Path) -> None:
    """A link, a pipe or a folder in a file's place."""
    victim = rng.choice(_files(root))
    victim.unlink()
    choice = rng.randrange(3)
    if choice == 0:
        victim.symlink_to("/etc/hostname")
    elif choice == 1:
        os.mkfifo(victim)
    else:
        victim.mkdir()


def _open_up(rng: random.Random, root: Path) -> None:
    """Others may read it."""
    rng.choice([root, *(entry for entry in root.iterdir() if entry.is_dir())]).chmod(0o755)


WAYS: tuple[Callable[[random.Random, Path], None], ...] = (
    _replace,
    _truncate,
    _flip,
    _grow,
    _remove,
    _swap,
    _rename,
    _plant,
    _misplace,
    _open_up,
)
NAMES = ("a", "a", "a", "another model", "another dtype", "another version")


def make_template(root: Path) -> None:
    """Fill a folder with objects of two identities."""
    for name in ("a", "b"):
        engine = Engine(root, name)
        for number in range(NUM_OBJECTS):
            assert engine.write(number)
        engine.close()


def spoil_and_open(template: Path, place: Path, seed: int) -> Counter[str]:
    """Spoil a copy of a folder, open it, read and write: never a wrong byte, never a crash."""
    rng = random.Random(seed)
    root = place / "cache"
    shutil.copytree(template, root)
    root.chmod(0o700)
    told: Counter[str] = Counter(folders=1)
    for _ in range(rng.randrange(1, 4)):
        rng.choice(WAYS)(rng, root)
    name = rng.choice(NAMES)
    try:
        engine = Engine(root, name)
    except FolderError:
        told["refused"] += 1
    else:
        try:
            found = engine.store.content.list_objects()
            told["found"] += len(found)
            # Asserts that what is read is what was written.
            told["whole"] += engine.count_right()
            if name != "a":
                assert not found, "objects of another engine were found"
            assert engine.store.content.find_faults() == []
            told["written"] += engine.write(rng.randrange(50))
            assert disk_bytes(root) <= LIMIT
        finally:
            engine.close()
    shutil.rmtree(root)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folders", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    totals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        template = Path(place) / "template"
        make_template(template)
        for seed in tqdm(range(arguments.first, arguments.first + arguments.folders)):
            totals += spoil_and_open(template, Path(place), seed)
    print(json.dumps(totals))


if __name__ == "__main__":
    main()
