"""The disk's thread: what a reset may forget, and that nobody waits for an answer in vain."""

import threading

import pytest

from vllm.v1.kv_offload.store import keeper as keeper_module
from vllm.v1.kv_offload.store.folder import CacheFolder, Identity, read_small
from vllm.v1.kv_offload.store.keeper import StoreKeeper

LIMIT = 16 << 20
IDENTITY = Identity({"weights": "a"}, 1, [4000])
TIMEOUT_S = 60


@pytest.fixture
def root(tmp_path):
    """A folder that another engine has used."""
    root = tmp_path / "cache"
    folder = CacheFolder(root, LIMIT)
    folder.open_store(IDENTITY).opening.load()
    folder.write_small(root / IDENTITY.name / "rates", b"{}")
    folder.close()
    return root


@pytest.fixture
def open_keeper(root):
    """Opens the folder in a keeper, and waits until it is open."""
    keepers = []

    def open_folder(*, read_only=False):
        keeper = StoreKeeper(
            lambda: CacheFolder(root, LIMIT, read_only=read_only), lambda note, stop: IDENTITY
        )
        keepers.append(keeper)
        woken = threading.Event()
        keeper.bind_wake(woken.set)
        while keeper.is_opening or not keeper.store.state.is_ready:
            assert woken.wait(TIMEOUT_S)
            woken.clear()
        return keeper

    yield open_folder
    for keeper in keepers:
        keeper.close()


def test_a_reset_forgets_what_was_measured_too(root, open_keeper):
    keeper = open_keeper()
    assert keeper.recall("rates") == b"{}"
    assert keeper.clear()
    assert not (root / IDENTITY.name / "rates").exists()


def test_a_reset_leaves_a_folder_that_is_only_read(root, open_keeper):
    assert not open_keeper(read_only=True).clear()
    assert read_small(root / IDENTITY.name / "rates") == b"{}"


def test_a_reset_is_answered_when_the_disk_fails(root, open_keeper, monkeypatch, caplog):
    keeper = open_keeper()
    # It cannot be unlinked.
    (root / IDENTITY.name / "warm").mkdir()
    monkeypatch.setattr(keeper_module, "_CLEAR_S", None)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(keeper.clear()), daemon=True)
    asking.start()
    asking.join(TIMEOUT_S)
    assert answers == [False]
    keeper.close()
    assert not keeper.store.state.is_writable
    assert sum("is written no more" in record.message for record in caplog.records) == 1


def test_a_disk_that_refuses_small_files_is_told_of_once(root, open_keeper, caplog):
    keeper = open_keeper()
    # It cannot be replaced.
    (root / IDENTITY.name / "warm").mkdir()
    for _ in range(3):
        keeper.remember("warm", b"{}")
    keeper.close()
    assert not keeper.store.state.is_writable
    assert sum("is written no more" in record.message for record in caplog.records) == 1


def test_a_disk_that_hangs_is_asked_once_for_each_thing(root, open_keeper):
    keeper = open_keeper()
    # The thread waits here as it would for the disk.
    hangs, released = threading.Event(), threading.Event()

    def hang():
        hangs.set()
        assert released.wait(TIMEOUT_S)

    keeper._work.put(hang)
    assert hangs.wait(TIMEOUT_S)
    for number in range(1000):
        keeper.make_room()
        keeper.remember("rates", b"%d" % number)
        keeper.remember("warm", b"%d" % number)
    assert keeper._work.qsize() == 3
    released.set()
    keeper.close()
    folder = root / IDENTITY.name
    assert read_small(folder / "rates") == read_small(folder / "warm") == b"999"
    assert not keeper._is_room_ordered
