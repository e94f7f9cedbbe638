"""Drives a store over a simulated disk as an engine does, and knows what must be found in it."""

from __future__ import annotations

import random
from hashlib import sha256
from pathlib import Path

from tests.v1.kv_offload.crash_disk import CrashDisk, PowerCutError
from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.opening import IndexUnreadError
from vllm.v1.kv_offload.store.records import ObjectKey, ObjectSpec, Reservation
from vllm.v1.kv_offload.store.rows_file import CorruptObjectError, RowsFile
from vllm.v1.kv_offload.store.store_state import StoreShape

INDEX, ROWS = Path("/disk/index"), Path("/disk/rows.0")
SHAPE = StoreShape(slot_bytes=512, num_pages=3, max_slots=72, seed=7)


def key_of(number: int) -> ObjectKey:
    return ObjectKey.of(ObjectKind(1 + number % 2), sha256(str(number).encode()).digest())


def bytes_of(number: int, version: int) -> bytes:
    rng = random.Random(number * 1000 + version)
    return rng.randbytes(rng.randrange(100, 3000))


def no_limit(wanted: int) -> int:
    return wanted


class StoreDriver:
    """One store, reopened after each cut."""

    rows_class: type[RowsFile] = RowsFile

    def __init__(self, seed: int, shape: StoreShape = SHAPE) -> None:
        self.rng = random.Random(seed)
        self.disk = CrashDisk(self.rng)
        self.shape = shape
        # What was last written under a name, whether or not it was acknowledged: by number.
        self.written: dict[ObjectKey, list[bytes]] = {}
        self.numbers: dict[ObjectKey, int] = {}
        self.num_checked = self.num_acknowledged = 0
        self.time = 0.0
        self.begun: list[Reservation] = []
        self.is_damaged = False
        self.open()

    def open(self) -> None:
        self.begun = []
        self.disk.meanwhile = self._write_meanwhile
        index = self.disk.open(INDEX)
        self.disk.allocate(index, self.shape.index_bytes)
        self.disk.sync(index)
        rows = self.disk.open(ROWS)
        self.disk.sync_folder(INDEX.parent)
        self.rows = self.rows_class(self.disk, rows, self.shape.slot_bytes)
        self.store = ObjectStore(self.disk, index, [rows], self.shape, no_limit, lambda: self.time)
        self.store.opening.begin()
        self._look_early()
        while self.store.opening.read_on():
            pass

    def _look_early(self) -> None:
        """Some objects are looked up, and read, before the index is."""
        for number in self.rng.sample(range(60), 4):
            (entry,) = self._find_early(key_of(number))
            if entry is None or not self.store.pin([entry]):
                continue
            try:
                self.check(entry)
            except CorruptObjectError:
                if not self.is_damaged:
                    raise
                self.store.report_corrupt(entry)
                assert self._find_early(key_of(number)) == [None]
            self.store.unpin([entry])

    def _find_early(self, key: ObjectKey):
        while True:
            try:
                return self.store.find([key])
            except IndexUnreadError:
                assert self.store.opening.read_on()

    # ---- what an engine does -----------------------------------------------------------------

    def step(self) -> None:
        choice = self.rng.random()
        if choice < 0.6:
            self.write_batch(self.rng.randrange(1, 5))
        elif choice < 0.8:
            self.store.writer.make_room(may_wait=self.rng.random() < 0.5)
        elif choice < 0.9:
            self.use_some()
        else:
            keys = [key_of(self.rng.randrange(60)) for _ in range(3)]
            self.store.pass_by(keys)
            self.store.use(keys[:1], is_hit=self.rng.random() < 0.5)

    def _write_meanwhile(self, path: Path) -> None:
        """A worker writes its next batch while the index is being written."""
        if path == INDEX and self.rng.random() < 0.3:
            self.begun += self.begin_batch(1)

    def write_batch(self, count: int) -> list[Reservation]:
        reserved, self.begun = [*self.begun, *self.begin_batch(count)], []
        done = self.store.writer.commit(reserved)
        self.num_acknowledged += len(done)
        return done

    def begin_batch(self, count: int) -> list[Reservation]:
        specs, data = [], {}
        for number in self.rng.sample(range(60), count):
            key = key_of(number)
            # Another run of the same engine may give the same rows other bytes above its limit.
            data[key] = bytes_of(number, self.rng.randrange(3))
            specs.append(ObjectSpec(key, number * 8, len(data[key]), number))
            self.numbers[key] = number
        reserved = [r for r in self.store.reserve(specs) if r is not None]
        try:
            for reservation in reserved:
                key = reservation.spec.key
                self.written.setdefault(key, []).append(data[key])
                self.rows.write(reservation.extent, [data[key][:50], data[key][50:]])
        except OSError:
            self.store.abandon(reserved)
            return []
        try:
            self.rows.sync()
        except OSError:
            self.store.abandon(reserved, retire=True)
            return []
        return reserved

    def use_some(self) -> None:
        found = [f for f in self.store.find([key_of(self.rng.randrange(60))]) if f is not None]
        if self.store.pin(found):
            for entry in found:
                self.check(entry)
            self.store.unpin(found)

    # ---- what must hold ----------------------------------------------------------------------

    def check(self, entry) -> None:
        data = self.rows.read(entry.extent)
        assert bytes(data) in self.written[entry.extent.key], "wrong bytes"
        number = self.numbers[entry.extent.key]
        assert (entry.position, entry.next_token) == (number * 8, number)
        self.num_checked += 1

    def check_all(self) -> None:
        """Whatever a store finds is whole, and no slot is in two places."""
        for entry in self.store.content.list_objects():
            self.check(entry)
        assert self.store.content.find_faults() == []
        kinds = [entry.extent.key.kind for entry in self.store.content.list_objects()]
        counted = {kind.name.lower(): kinds.count(kind) for kind in ObjectKind}
        assert self.store.content.num_objects() == counted

    def cut(self, num_steps: int) -> None:
        """Run until the power goes at a random call; start again; all that was there is there."""
        self.disk.calls_left = self.rng.randrange(1, 12 * num_steps)
        try:
            for _ in range(num_steps):
                self.step()
        except PowerCutError:
            pass
        # Acknowledged, and not given up since.
        before = {entry.extent for entry in self.store.content.list_objects()}
        self.disk.power_cut()
        self.open()
        after = {entry.extent for entry in self.store.content.list_objects()}
        assert before <= after, "an acknowledged object is gone"
        self.check_all()

    def flip(self) -> int:
        """Flip one bit anywhere; returns how many objects that cost."""
        path = self.rng.choice((INDEX, ROWS))
        before = len(self.store.content.list_objects())
        self.disk.flip_bit(path)
        self.is_damaged = True
        self.open()
        found = 0
        for entry in self.store.content.list_objects():
            try:
                self.check(entry)
                found += 1
            except CorruptObjectError:
                self.store.report_corrupt(entry)
        return before - found
