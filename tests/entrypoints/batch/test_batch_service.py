"""States of a batch, over a server that is a function."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm.entrypoints.batch.batch_service import BatchService, Reply
from vllm.entrypoints.batch.batch_store import ENDED, BatchBody, BatchStore
from vllm.entrypoints.batch.file_store import BATCH, FileStore
from vllm.entrypoints.batch.lines import BatchRequest
from vllm.exceptions import FileNotStoredError, UserInputError

CHATS = "/v1/chat/completions"
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 3},
}


class Server:
    """Answers lines; notes them.

    Attributes:
        stops_at: Answers after which lines wait for ever; None: none does.
        replies: First answers of lines, by custom_id.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.owners: set[str | None] = set()
        self.stops_at: int | None = None
        self.replies: dict[str, list[Reply]] = {}
        self.num_left = 0

    async def __call__(self, request: BatchRequest, owner: str | None) -> Reply:
        if self.stops_at is not None and len(self.asked) >= self.stops_at:
            try:
                await asyncio.Event().wait()
            finally:
                self.num_left += 1
        self.asked.append(request.custom_id)
        self.owners.add(owner)
        waiting = self.replies.get(request.custom_id)
        if waiting:
            return waiting.pop(0)
        return Reply(200, f"req-{request.custom_id}", {"id": request.custom_id, "usage": USAGE})


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class House:
    """A folder, and the processes that work on it one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.server = folder, Clock(), Server()
        self.open()

    def open(self) -> None:
        """Begin a process."""
        self.files = FileStore(self.folder, 100_000, self.clock)
        self.store = BatchStore(self.folder)
        self.service = BatchService(self.files, self.store, 3, self.clock)

    def upload(self, count: int, owner: str | None = None) -> str:
        """Keep a file of so many lines."""
        with self.files.write(owner, "in.jsonl", BATCH) as writer:
            for i in range(count):
                body = {"model": "m", "messages": [{"role": "user", "content": f"{i:03}"}]}
                row = {"custom_id": f"c{i}", "method": "POST", "url": CHATS, "body": body}
                writer.add(json.dumps(row).encode() + b"\n")
            return writer.finish().id

    def rows(self, file_id: str | None, owner: str | None = None) -> list[dict[str, Any]]:
        """The lines of a file of results; none of one that is not there."""
        if file_id is None:
            return []
        text = self.files.path_of(file_id, owner).read_text()
        return [json.loads(raw) for raw in text.splitlines()]


@pytest.fixture
async def house(tmp_path: Path) -> House:
    """A folder and a process, which has begun."""
    house = House(tmp_path / "batches")
    house.service.start(house.server)
    return house


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0.001)


async def ended(house: House, body: BatchBody) -> BatchBody:
    await until(lambda: house.service.find(body.id, None).status in ENDED)
    return house.service.find(body.id, None)


async def test_all_lines_are_answered_once(house: House) -> None:
    no_room = Reply(503, "", {}, 0.0)
    house.server.replies = {
        "c1": [Reply(400, "r", {"error": {"message": "wrong"}})],
        "c2": [no_room, no_room],
    }
    begun = house.service.create(None, house.upload(7), CHATS, metadata={"a": "b"})
    assert begun.status == "validating"
    body = await ended(house, begun)
    assert (body.status, body.model, body.metadata) == ("completed", "m", {"a": "b"})
    counts = body.request_counts
    assert (counts.total, counts.completed, counts.failed) == (7, 6, 1)
    good, bad = house.rows(body.output_file_id), house.rows(body.error_file_id)
    assert sorted(row["custom_id"] for row in good) == ["c0", *(f"c{i}" for i in range(2, 7))]
    assert [row["response"]["status_code"] for row in bad] == [400]
    assert good[0]["response"]["request_id"].startswith("req-")
    assert house.server.asked.count("c2") == 3
    assert body.usage is not None
    assert (body.usage.input_tokens, body.usage.total_tokens) == (42, 54)
    assert body.usage.input_tokens_details.cached_tokens == 18
    assert body.in_progress_at == body.completed_at == house.clock.now


async def test_a_killed_process_loses_and_repeats_nothing(house: House) -> None:
    file_id = house.upload(9)
    house.server.stops_at = 4
    body = house.service.create(None, file_id, CHATS)
    await until(lambda: len(house.server.asked) == 4)
    # What runs is left as it is, and the log ends in the middle of a line.
    (log,) = (house.folder / "batches").glob("*.jsonl")
    await until(lambda: log.read_bytes().count(b"\n") == 4)
    with log.open("ab") as file:
        file.write(b'{"number":5,"is_good":tr')
    first = house.server.asked
    killed = house.service
    house.server = Server()
    house.open()
    house.service.start(house.server)
    body = await ended(house, body)
    assert body.status == "completed"
    assert body.request_counts.completed == 9
    assert sorted(first + house.server.asked) == sorted(f"c{i}" for i in range(9))
    ids = [row["custom_id"] for row in house.rows(body.output_file_id)]
    assert sorted(ids) == sorted(f"c{i}" for i in range(9))
    assert not list((house.folder / "batches").glob("*.jsonl"))
    await killed.stop()


async def test_killed_while_results_are_written(house: House) -> None:
    body = await ended(house, house.service.create(None, house.upload(3), CHATS))
    record = house.store.find(body.id)
    assert record is not None
    rows = house.rows(body.output_file_id)
    record.body.status, record.body.output_file_id = "finalizing", None
    with house.store.open_log(body.id) as log:
        from vllm.entrypoints.batch.batch_store import Answered

        for number, row in enumerate(rows, 1):
            log.add(Answered(number, True, row))
    house.store.save(record)
    house.open()
    house.service.start(house.server)
    again = await ended(house, body)
    assert house.rows(again.output_file_id) == rows
    assert len(house.files.files_of(None)) == 2


async def test_cancel_keeps_what_is_done(house: House) -> None:
    house.server.stops_at = 2
    body = house.service.create(None, house.upload(9), CHATS)
    await until(lambda: len(house.server.asked) == 2)
    await until(lambda: body.request_counts.completed == 2)
    assert house.service.cancel(body.id, None).status == "cancelling"
    body = await ended(house, body)
    assert (body.status, body.request_counts.completed) == ("cancelled", 2)
    assert body.cancelled_at == body.cancelling_at == house.clock.now
    assert len(house.rows(body.output_file_id)) == 2
    assert house.server.num_left == 3
    with pytest.raises(UserInputError, match="is cancelled"):
        house.service.cancel(body.id, None)


async def test_what_is_late_is_an_error(house: House) -> None:
    house.server.stops_at = 4
    body = house.service.create(None, house.upload(6), CHATS)
    await until(lambda: body.request_counts.completed == 4)
    await house.service.stop()
    house.clock.now += 24 * 3600
    house.open()
    house.service.start(house.server)
    body = await ended(house, body)
    assert body.status == "expired"
    counts = body.request_counts
    assert (counts.completed, counts.failed) == (4, 2)
    assert len(house.rows(body.output_file_id)) == 4
    late = house.rows(body.error_file_id)
    assert [row["error"]["code"] for row in late] == ["batch_expired"] * 2
    assert all(row["response"] is None for row in late)


async def test_a_bad_line_and_a_lost_input_fail_the_batch(house: House) -> None:
    with house.files.write(None, "in", BATCH) as writer:
        writer.add(b'{"custom_id": 5}\n')
        file_id = writer.finish().id
    body = await ended(house, house.service.create(None, file_id, CHATS))
    assert body.status == "failed"
    assert body.errors is not None
    assert body.errors.data[0].line == 1
    body = house.service.create(None, house.upload(1), CHATS)
    house.files.delete(body.input_file_id, None)
    body = await ended(house, body)
    assert body.errors is not None
    assert body.errors.data[0].code == "input_file_missing"
    assert house.server.asked == []


async def test_owners_see_their_own(house: House) -> None:
    file_id = house.upload(1, "ada")
    body = house.service.create("ada", file_id, CHATS)
    for owner in (None, "bob"):
        with pytest.raises(FileNotStoredError):
            house.service.find(body.id, owner)
        with pytest.raises(FileNotStoredError):
            house.service.create(owner, file_id, CHATS)
        with pytest.raises(FileNotStoredError):
            house.files.delete(file_id, owner)
        assert house.service.batches_of(owner) == []
    await until(lambda: house.service.find(body.id, "ada").status in ENDED)
    assert house.server.owners == {"ada"}
    assert len(house.rows(house.service.find(body.id, "ada").output_file_id, "ada")) == 1


async def test_files_expire_and_are_bounded(house: House) -> None:
    with house.files.write(None, "a", BATCH, expires_in=3600) as writer:
        writer.add(b"x" * 10)
        about = writer.finish()
    house.clock.now += 3599
    assert house.files.find(about.id, None).bytes == 10
    house.clock.now += 1
    with pytest.raises(FileNotStoredError):
        house.files.path_of(about.id, None)
    with house.files.write(None, "b", BATCH) as writer, pytest.raises(UserInputError, match="fit"):
        writer.add(b"x" * 100_001)
    assert house.files.files_of(None) == []
    # Nothing is left of it, and a start removes what a killed process left.
    left = house.folder / "files" / "file-1.part"
    left.write_bytes(b"half")
    (house.folder / "files" / "file-2.data").write_bytes(b"without its description")
    house.open()
    assert list((house.folder / "files").iterdir()) == []


async def test_an_input_does_not_expire_while_it_is_read(house: House) -> None:
    house.server.stops_at = 0
    with house.files.write(None, "a", BATCH, expires_in=3600) as writer:
        body = {"model": "m", "messages": []}
        row = {"custom_id": "c", "method": "POST", "url": CHATS, "body": body}
        writer.add(json.dumps(row).encode())
        file_id = writer.finish().id
    batch = house.service.create(None, file_id, CHATS)
    house.clock.now += 7200
    house.files.expire()
    assert house.files.find(file_id, None).id == file_id
    house.service.cancel(batch.id, None)
    await ended(house, batch)
    house.files.expire()
    with pytest.raises(FileNotStoredError):
        house.files.find(file_id, None)


async def test_nothing_stays_for_ever(house: House) -> None:
    """Inputs, results and batches go after 30 days; what is for another purpose stays."""
    body = await ended(house, house.service.create(None, house.upload(2), CHATS))
    with house.files.write(None, "seen.png", "vision") as writer:
        kept = writer.finish().id
    assert len(house.files.files_of(None)) == 3
    house.clock.now += 30 * 24 * 3600 - 1
    house.service.drop_old()
    assert len(house.files.files_of(None)) == 3
    assert house.service.find(body.id, None)
    house.clock.now += 1
    house.service.drop_old()
    assert [about.id for about in house.files.files_of(None)] == [kept]
    with pytest.raises(FileNotStoredError):
        house.service.find(body.id, None)
    assert list((house.folder / "batches").iterdir()) == []
    assert len(list((house.folder / "files").iterdir())) == 2


async def test_what_has_expired_leaves_its_room(house: House) -> None:
    for _ in range(2):
        with house.files.write(None, "a", BATCH, expires_in=3600) as writer:
            writer.add(b"x" * 100_000)
            writer.finish()
        with pytest.raises(UserInputError, match="delete some first"):
            house.service.create(None, house.files.files_of(None)[0].id, CHATS)
        house.clock.now += 3600


async def test_batches_are_bounded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.entrypoints.batch.batch_service.MAX_BATCHES", 3)
    monkeypatch.setattr("vllm.entrypoints.batch.batch_service.MAX_OPEN", 2)
    monkeypatch.setattr("vllm.entrypoints.batch.file_store.MAX_FILES", 8)
    made = []
    for _ in range(4):
        house.clock.now += 1
        made.append((await ended(house, house.service.create(None, house.upload(1), CHATS))).id)
    assert [body.id for body in house.service.batches_of(None)] == made[:0:-1]
    with pytest.raises(UserInputError, match="There are 8 files of yours"):
        house.upload(1)
    house.server.stops_at = 0
    file_id = made and house.service.find(made[-1], None).input_file_id
    house.clock.now += 1
    begun = [house.service.create(None, file_id, CHATS).id for _ in range(2)]
    assert {body.id for body in house.service.batches_of(None)} == {made[-1], *begun}
    with pytest.raises(UserInputError, match="2 batches of yours are open"):
        house.service.create(None, file_id, CHATS)
    house.upload(1, "ada")
    house.service.create("ada", house.upload(1, "ada"), CHATS)
    with pytest.raises(UserInputError, match="cancel it first"):
        house.service.delete(begun[0], None)
    house.service.delete(made[-1], None)
    assert {body.id for body in house.service.batches_of(None)} == set(begun)
    await house.service.stop()
