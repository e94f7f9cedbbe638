"""Frames: whatever was changed on its way is not believed."""

import pytest

from vllm.distributed.kv_transfer.handover.frames import (
    HEAD_BYTES,
    MAX_CONTROL_BYTES,
    FrameError,
    Head,
    Kind,
    check_control,
    control_frame,
    digest_payload,
    rows_key,
)
from vllm.distributed.kv_transfer.handover.messages import Pull, Release, decode, encode, to_ranges


def test_a_head_says_what_was_packed() -> None:
    head = Head(Kind.ROWS, 2**62, 7, 1 << 22, b"12345678")
    data = head.pack()
    assert len(data) == HEAD_BYTES
    assert Head.unpack(data) == head


@pytest.mark.parametrize("bit", range(HEAD_BYTES * 8))
def test_no_bit_of_a_head_may_change(bit: int) -> None:
    data = bytearray(Head(Kind.END, 3, 1, 0, bytes(8)).pack())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError, match="checksum"):
        Head.unpack(data)


def test_frames_of_another_protocol_are_told() -> None:
    with pytest.raises(FrameError, match="checksum"):
        Head.unpack(b"GET / HTTP/1.1\r\nHost: here\r\nA: bcdefg"[:HEAD_BYTES])
    with pytest.raises(FrameError, match="above"):
        Head.unpack(Head(Kind.PULL, 1, 0, MAX_CONTROL_BYTES + 1, bytes(8)).pack())


def test_the_digest_belongs_to_lease_generation_and_place() -> None:
    rows = (b"ab", memoryview(b"cd"))
    digests = {
        digest_payload(rows_key(lease, generation, index), rows)
        for lease in ("a", "b")
        for generation in (1, 2)
        for index in (0, 1)
    }
    assert len(digests) == 8
    # How the rows are cut into pieces does not matter.
    assert digest_payload(rows_key("a", 1, 0), (b"abcd",)) in digests


def test_control_frames_are_checked() -> None:
    head_bytes, payload = control_frame(Kind.RELEASE, encode(Release("x")))
    head = Head.unpack(head_bytes)
    assert decode(check_control(head, payload), Release) == Release("x")
    with pytest.raises(FrameError, match="RELEASE"):
        check_control(head, payload[:-1] + b"?")
    # A payload of another kind of frame has another digest.
    with pytest.raises(FrameError):
        check_control(Head(Kind.PULL, 0, 0, head.length, head.digest), payload)


def test_messages_that_are_none_are_told() -> None:
    with pytest.raises(FrameError, match="Pull"):
        decode(encode(Release("x")), Pull)
    with pytest.raises(FrameError, match="Pull"):
        decode(b"\xc1", Pull)


@pytest.mark.parametrize(
    ("indices", "ranges"),
    [([], []), ([0], [(0, 1)]), ([0, 1, 2, 5, 7, 8], [(0, 3), (5, 6), (7, 9)])],
)
def test_missing_places_are_told_as_ranges(
    indices: list[int], ranges: list[tuple[int, int]]
) -> None:
    assert to_ranges(indices) == ranges
