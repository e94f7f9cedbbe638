from tests.v1.kv_offload.folder_engine import key_of
from vllm.v1.kv_offload.writes.turnover import SeenObjects, Turnover


def test_room_is_free_and_reads_pay_for_writing_over():
    turnover = Turnover()
    turnover.begin(1000, 400)
    turnover.spend(599)
    assert not turnover.is_scarce
    turnover.spend(50)
    assert turnover.is_scarce
    # Nothing is owed: the first read lets writes go on.
    turnover.note_read(30)
    assert not turnover.is_scarce
    turnover.spend(30)
    assert turnover.is_scarce


def test_reads_save_up_no_more_than_the_folder_once():
    turnover = Turnover()
    turnover.begin(1000, 1200)
    assert turnover.is_scarce
    turnover.note_read(1 << 40)
    turnover.spend(1000)
    assert turnover.is_scarce


def test_a_folder_that_nobody_knows_is_not_scarce():
    turnover = Turnover()
    turnover.spend(1 << 40)
    assert not turnover.is_scarce


def test_an_object_was_seen_if_less_than_a_folder_came_after_it():
    seen = SeenObjects()
    seen.max_bytes = 100
    assert [seen.add(key_of(n), 25) for n in range(4)] == [False] * 4
    assert seen.add(key_of(0), 25)
    # Object 1 is the oldest now.
    assert not seen.add(key_of(4), 25)
    assert not seen.add(key_of(1), 25)
    assert seen.add(key_of(0), 25)
    # One that is larger than the folder pushes all others out, and is known itself.
    assert not seen.add(key_of(9), 500)
    assert seen.add(key_of(9), 500)
    assert not seen.add(key_of(0), 25)
    seen.clear()
    assert not seen.add(key_of(0), 25)


def test_an_object_that_is_wanted_again_takes_no_more_room():
    seen = SeenObjects()
    seen.max_bytes = 75
    assert [seen.add(key_of(0), 25) for _ in range(3)] == [False, True, True]
    assert not any(seen.add(key_of(n), 25) for n in (1, 2))
    assert seen.add(key_of(0), 25)
