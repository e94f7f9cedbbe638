"""Pictures decoded in processes of their own: the same pixels, and mishaps stay there."""

import os
import signal
from collections.abc import Iterator
from typing import IO

import numpy as np
import pytest

from tests.entrypoints.image_fixtures import family_of, file_of, picture, tokenizer_of, url_of
from vllm.exceptions import EngineError, UserInputError
from vllm.multimodal import decode_process
from vllm.multimodal.decode import DecodeRules, decode_image, resize
from vllm.multimodal.decode_process import DecodeProcesses
from vllm.multimodal.fetch import ImageFetcher
from vllm.multimodal.reader import GivenImage, ImageReader
from vllm.multimodal.sources import read_url

SIZES = family_of("qwen3_5", tokenizer_of("qwen3_5")).sizes
RULES = DecodeRules(background=(9, 8, 7))


@pytest.fixture(scope="module")
def processes() -> Iterator[DecodeProcesses]:
    made = DecodeProcesses(1, timeout_s=30)
    yield made
    made.close()


def test_pixels_are_those_of_this_process(processes: DecodeProcesses) -> None:
    for number, kind in enumerate(("PNG", "JPEG", "WEBP", "BMP")):
        data = file_of(picture(number, 90 + 40 * number, 70), kind)
        pixels = decode_image(data, RULES)
        size = SIZES.fit(pixels.shape[1], pixels.shape[0])
        found, own = processes.decode(data, RULES, SIZES)
        assert own == size
        assert found == resize(pixels, size, SIZES.resample).tobytes()
    child = processes._all[0]._child
    assert child is not None
    assert child.pid != os.getpid()


def test_errors_are_those_of_this_process(processes: DecodeProcesses) -> None:
    whole = file_of(picture(0), "PNG")
    for data in (b"", b"no picture", whole[:200], file_of(picture(1, 2010, 9), "PNG")):
        with pytest.raises(UserInputError) as here:
            SIZES.fit(*decode_image(data, RULES).shape[1::-1])
        with pytest.raises(UserInputError) as there:
            processes.decode(data, RULES, SIZES)
        assert str(there.value) == str(here.value)
        assert there.value.param == here.value.param


def test_a_process_that_ends_or_hangs_is_replaced() -> None:
    processes = DecodeProcesses(1, timeout_s=30)
    data = file_of(picture(0), "PNG")
    try:
        expected = processes.decode(data, RULES, SIZES)
        own = processes._all[0]
        assert own._child is not None
        os.kill(own._child.pid, signal.SIGSTOP)
        own._timeout_s = 0.2
        with pytest.raises(UserInputError, match=r"takes longer than 0.2 s"):
            processes.decode(data, RULES, SIZES)
        own._timeout_s = 30
        assert processes.decode(data, RULES, SIZES) == expected
        # Between two pictures, and in the middle of one.
        own._child.kill()
        own._child.wait()
        assert processes.decode(data, RULES, SIZES) == expected
        os.kill(own._child.pid, signal.SIGSTOP)
        os.kill(own._child.pid, signal.SIGKILL)
        own._child.poll = lambda: None  # type: ignore[method-assign]
        with pytest.raises(UserInputError, match="ends its reader"):
            processes.decode(data, RULES, SIZES)
        assert processes.decode(data, RULES, SIZES) == expected
    finally:
        processes.close()
    assert own._child is None


def test_an_answer_that_was_not_read_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = DecodeProcesses(1, timeout_s=30)
    blue, green = (file_of(picture(number), "PNG") for number in (1, 2))
    read = decode_process._read

    def fail(pipe: IO[bytes], count: int) -> bytes:
        monkeypatch.setattr(decode_process, "_read", read)
        raise MemoryError

    try:
        expected = processes.decode(green, RULES, SIZES)
        monkeypatch.setattr(decode_process, "_read", fail)
        with pytest.raises(MemoryError):
            processes.decode(blue, RULES, SIZES)
        assert processes.decode(green, RULES, SIZES) == expected
    finally:
        processes.close()


def test_a_process_that_does_not_start_is_no_pictures_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_process, "_BOOT", "print('no such module', flush=True)")
    processes = DecodeProcesses(1)
    try:
        with pytest.raises(EngineError, match="the server's log says why"):
            processes.decode(b"", RULES, SIZES)
    finally:
        processes.close()


def test_a_reader_beside_an_event_loop_reads_the_same() -> None:
    family = family_of("gemma3", tokenizer_of("gemma3"))
    given = [GivenImage("a", read_url(url_of(picture(5, 130, 60))))]
    read = []
    for is_apart in (False, True):
        reader = ImageReader(
            family, family.sizes, "t", rules=RULES, fetcher=ImageFetcher(()), is_apart=is_apart
        )
        read += reader.read_now(given, {})
        reader.close()
    assert read[0] == read[1]
    assert np.frombuffer(read[1].pixels, np.uint8).any()
