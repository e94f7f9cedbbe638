"""Weights are read once: by one start, for the next ones and for cores that start beside it."""

import os
import resource
import threading
from pathlib import Path

import pytest

from vllm.exceptions import CheckpointError
from vllm.v1.kv_offload.store.weights_digest import digest_files


@pytest.fixture
def weights(tmp_path) -> list[Path]:
    """Two files of weights."""
    files = [tmp_path / f"part-{i}.safetensors" for i in range(2)]
    for i, file in enumerate(files):
        file.write_bytes(bytes([i]) * 1000)
    return files


class Reader(threading.Thread):
    """Digests beside others, and can be held in the middle of a file."""

    def __init__(self, weights: list[Path], memory: Path) -> None:
        super().__init__(daemon=True)
        self._weights, self._memory = weights, memory
        self.is_reading, self.may_go_on, self.stop = (threading.Event() for _ in range(3))
        self.num_read = 0
        self.digest: str | None = "none yet"

    def run(self) -> None:
        """Digest."""
        self.digest = digest_files(self._weights, self._memory, self._note, self.stop)

    def _note(self, done: int, total: int) -> None:
        self.num_read += 1
        self.is_reading.set()
        assert self.may_go_on.wait(60)


def test_one_reads_and_those_beside_it_find_what_it_found(tmp_path, weights):
    memory = tmp_path / "weights.json"
    first, second = Reader(weights, memory), Reader(weights, memory)
    first.start()
    assert first.is_reading.wait(60)
    second.may_go_on.set()
    second.start()
    # A reader that did not wait for its turn would be through with 2,000 bytes long since.
    assert not second.is_reading.wait(0.2)
    first.may_go_on.set()
    first.join(60)
    second.join(60)
    assert first.digest == second.digest == digest_files(weights)
    assert (first.num_read, second.num_read) == (2, 0)


def test_who_waits_can_be_stopped(tmp_path, weights):
    memory = tmp_path / "weights.json"
    first, second = Reader(weights, memory), Reader(weights, memory)
    first.start()
    assert first.is_reading.wait(60)
    second.start()
    second.stop.set()
    second.join(60)
    assert second.digest is None
    first.may_go_on.set()
    first.join(60)
    assert first.digest == digest_files(weights)


def test_what_may_not_be_written_is_read(tmp_path, weights):
    memory = tmp_path / "folder" / "weights.json"
    memory.parent.mkdir()
    expected = digest_files(weights, memory, remembers=False)
    assert list(memory.parent.iterdir()) == []
    assert digest_files(weights, memory) == expected
    read: list[int] = []
    found = digest_files(weights, memory, lambda done, _: read.append(done), remembers=False)
    assert (found, read) == (expected, [])


def test_another_byte_is_another_digest(tmp_path, weights):
    memory = tmp_path / "weights.json"
    before = digest_files(weights, memory)
    weights[1].write_bytes(bytes([1]) * 999 + b"x")
    assert digest_files(weights, memory) == digest_files(weights) != before


def test_a_reading_that_was_stopped_goes_on_behind_the_files_it_read(tmp_path, weights):
    memory = tmp_path / "weights.json"
    stop = threading.Event()
    # With the first file's last byte.
    assert digest_files(weights, memory, lambda done, _: stop.set(), stop) is None
    read: list[int] = []
    found = digest_files(weights, memory, lambda done, _: read.append(done))
    assert (found, read) == (digest_files(weights), [2000])


@pytest.mark.parametrize("name", ["weights.lock", "weights.json.new"])
def test_what_cannot_be_remembered_is_one_warning(tmp_path, weights, caplog, name):
    memory = tmp_path / "folder" / "weights.json"
    memory.parent.mkdir()
    os.mkfifo(memory.with_name(name))
    assert digest_files(weights, memory) == digest_files(weights)
    assert not memory.exists()
    (told,) = caplog.messages
    assert "cannot be remembered" in told
    assert str(memory) in told


def test_a_full_disk_keeps_nobody_from_reading(tmp_path, weights, caplog):
    memory = tmp_path / "folder" / "weights.json"
    memory.parent.mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        found = digest_files(weights, memory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found == digest_files(weights)
    (told,) = caplog.messages
    assert "cannot be remembered" in told
    # What cannot be read stays an error.
    with pytest.raises(CheckpointError, match="gone cannot be read for a digest: No such file"):
        digest_files([*weights, tmp_path / "gone"], memory)
    with pytest.raises(CheckpointError, match=f"{tmp_path} cannot be read for a digest: Is a dir"):
        digest_files([tmp_path], None)
    assert digest_files(weights, memory) == found
    assert memory.exists()
