"""Rows of pictures on a disk: found again bit for bit, or not at all."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm.exceptions import ConfigError
from vllm.v1.worker.picture_store import PictureStore, make_folder, make_rows

PIXELS = np.zeros((2, 2, 3), dtype=np.uint8)


class CountingTower:
    """Makes other rows each time, so that rows that are found show themselves."""

    def __init__(self) -> None:
        self.count = 0

    def encode(self, pixels: torch.Tensor, keep_going: object) -> torch.Tensor:
        self.count += 1
        return torch.full((4, 3), 1 / 3 + self.count)


def make(tower: CountingTower, store: PictureStore | None, key: str) -> torch.Tensor:
    return make_rows(tower, store, key, PIXELS, lambda: None)  # type: ignore[arg-type]


def open_store(folder: Path, size: int = 1 << 20, maker: str = "build 1") -> PictureStore:
    return PictureStore(make_folder(str(folder)), size, maker)


def test_rows_outlive_a_process_and_belong_to_their_key_and_maker(tmp_path: Path) -> None:
    tower = CountingTower()
    first = make(tower, open_store(tmp_path / "rows"), "a")
    again = open_store(tmp_path / "rows")
    assert torch.equal(make(tower, again, "a"), first)
    assert tower.count == 1
    # Another tenant's key, another build.
    assert again.find("owner:a") is None
    assert open_store(tmp_path / "rows", maker="build 2").find("a") is None
    assert make(tower, None, "a")[0, 0] != first[0, 0]
    assert {oct(file.stat().st_mode & 0o777) for file in (tmp_path / "rows").iterdir()} == {"0o600"}


def test_damage_anywhere_is_noticed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.keep("a", torch.arange(12.0).view(4, 3))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    broken = [whole[:cut] for cut in (0, 5, 40, len(whole) - 1)] + [whole + b"x"]
    broken += [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 3)
    ]
    for data in broken:
        path.write_bytes(data)
        assert store.find("a") is None
        assert not path.exists()
    # A whole file in another's place is damage, too.
    path.write_bytes(whole)
    store.keep("b", torch.zeros(4, 3))
    (other,) = set(tmp_path.iterdir()) - {path}
    path.replace(other)
    assert store.find("b") is None
    store.keep("a", torch.arange(12.0).view(4, 3))
    assert torch.equal(store.find("a"), torch.arange(12.0).view(4, 3))


def test_the_longest_unread_go_first(tmp_path: Path) -> None:
    rows = torch.zeros(64, 16)
    store = open_store(tmp_path, size=5 * 4300)
    for number in range(4):
        store.keep(str(number), rows)
        (newest,) = [file for file in tmp_path.iterdir() if file.stat().st_mtime > 1e9]
        os.utime(newest, (number + 1, number + 1))
    assert store.find("0") is not None
    for number in range(4, 7):
        store.keep(str(number), rows)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 5 * 4300
    kept = [number for number in range(7) if store.find(str(number)) is not None]
    assert 0 in kept
    assert 6 in kept
    assert 1 not in kept
    # A limit that was lowered holds from the start; larger rows are not kept at all.
    small = open_store(tmp_path, size=5000)
    assert len(list(tmp_path.iterdir())) == 1
    small.keep("large", torch.zeros(640, 16))
    assert small.find("large") is None


def test_what_cannot_be_kept_is_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="mm_encoder_cache_dir"):
        open_store(tmp_path / "file" / "rows")
    store, tower = open_store(tmp_path / "rows"), CountingTower()
    (tmp_path / "rows").rmdir()
    make(tower, store, "a")
    make(tower, store, "a")
    assert tower.count == 2
    # What a process left that died while it wrote.
    store = open_store(tmp_path / "rows")
    left = tmp_path / "rows" / "abc.12.tmp"
    left.write_bytes(b"x")
    os.utime(left, (1, 1))
    open_store(tmp_path / "rows")
    assert not left.exists()


def test_several_processes_hold_one_bound(tmp_path: Path) -> None:
    stores = [open_store(tmp_path, 100_000) for _ in range(3)]
    for number in range(60):
        for place, store in enumerate(stores):
            store.keep(f"{place} {number}", torch.ones(100, 10))
    taken = sum(file.stat().st_size for file in tmp_path.iterdir())
    # Each looks at the folder once it has written a twentieth of what it may hold.
    assert 50_000 < taken < 125_000


def test_nothing_is_written_where_a_link_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "known")
    store, elsewhere = open_store(tmp_path / "rows"), tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    path = store._find_path("a")
    path.with_name(f"{path.stem}.known.tmp").symlink_to(elsewhere)
    store.keep("a", torch.ones(2, 2))
    assert elsewhere.read_text() == "mine"
    assert store.find("a") is None
