"""Reads the pictures of requests, beside the event loop, and remembers those it has read.

    origin -> bytes -> SHA-256 -> memo: read before? -> else decode, resize, identity -> memo

A conversation sends its older pictures with every turn: the memo saves decoding them again, not
hashing their files. It is kept apart by whoever may share (tenant and salt), so how long an answer
takes tells nobody what others have sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.exceptions import UserInputError
from vllm.multimodal.decode import DecodeRules, decode_image, pixels_of, resize
from vllm.multimodal.decode_process import DecodeProcesses
from vllm.multimodal.fetch import ImageFetcher
from vllm.multimodal.identity import image_identity
from vllm.multimodal.inputs import ImageFeature
from vllm.multimodal.sources import Origin, decode_base64, read_local_file

if TYPE_CHECKING:
    from vllm.multimodal.families import ImageFamily, ImageSize, SizeRule

_NUM_FETCHING = 4
_MAX_DECODING = 4
# What one entry costs beside its pixels.
_ENTRY_BYTES = 512
_MAX_NAMES = 10_000


@dataclass(frozen=True, slots=True)
class GivenImage:
    """A picture as a client gave it.

    Attributes:
        where: Its place in the request, for errors.
        origin: Where its bytes lie; None: it is here, or was sent before.
        image: A PIL image or an array that a program holds; None: it comes as bytes.
        detail: One of DETAILS.
        uuid: The client's name of it; None: it has none.
    """

    where: str
    origin: Origin | None = None
    image: Any = None
    detail: str = "auto"
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class ReadImage:
    """A picture, resized for the model.

    Attributes:
        identifier: Its identity.
        size: Its size.
        pixels: RGB, row by row.
    """

    identifier: str
    size: ImageSize
    pixels: bytes

    def at(self, offset: int) -> ImageFeature:
        """Return it as part of a prompt, its first soft token there."""
        size = self.size
        return ImageFeature(
            identifier=self.identifier,
            offset=offset,
            rows=size.rows,
            columns=size.columns,
            height=size.height,
            width=size.width,
            pixels=self.pixels,
        )


class ImageMemo:
    """Pictures that were read, the least recently used given up first.

    Owns: them.

    Args:
        max_bytes: Of all, about.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._known: OrderedDict[bytes, ReadImage] = OrderedDict()
        self._names: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes, about."""
        return self._num_bytes

    def find(self, key: bytes) -> ReadImage | None:
        """Return what was read under a key; None: nothing, or it was given up."""
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
            return found

    def add(self, key: bytes, image: ReadImage) -> None:
        """Remember a picture."""
        size = len(image.pixels) + _ENTRY_BYTES
        with self._lock:
            if key in self._known or size > self._max_bytes:
                return
            self._known[key] = image
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, oldest = self._known.popitem(last=False)
                self._num_bytes -= len(oldest.pixels) + _ENTRY_BYTES

    def find_named(self, scope: str, uuid: str) -> bytes | None:
        """Return the digest of the file that a client's name stood for; None: not known."""
        with self._lock:
            return self._names.get((scope, uuid))

    def name(self, scope: str, uuid: str, digest: bytes) -> bool:
        """Let a name stand for a file; return whether it stands for no other already."""
        with self._lock:
            known = self._names.setdefault((scope, uuid), digest)
            self._names.move_to_end((scope, uuid))
            while len(self._names) > _MAX_NAMES:
                self._names.popitem(last=False)
            return known == digest


class ImageReader:
    """Reads pictures for one model.

    Owns: its threads and the memo.

    Args:
        family: How the model sees pictures.
        sizes: Sizes as the server was told; requests may change them.
        tower: What tells the tower's weights from others.
        rules: How files are decoded.
        fetcher: Fetches from other hosts.
        folder: Of files that requests may name; None: none.
        memo_bytes: Of pictures to remember.
        is_apart: Whether files are decoded in processes of their own, beside an event loop.
    """

    def __init__(
        self,
        family: ImageFamily,
        sizes: SizeRule,
        tower: str,
        *,
        rules: DecodeRules,
        fetcher: ImageFetcher,
        folder: str | None = None,
        memo_bytes: int = 0,
        is_apart: bool = False,
    ) -> None:
        self._family = family
        self._sizes = sizes
        self._tower = tower
        self._rules = rules
        self._fetcher = fetcher
        self._folder = folder
        self.memo = ImageMemo(memo_bytes)
        count = min(os.cpu_count() or 1, _MAX_DECODING)
        self._decoders = ThreadPoolExecutor(count, thread_name_prefix="images")
        self._processes = DecodeProcesses(count) if is_apart else None
        self._fetchers = ThreadPoolExecutor(_NUM_FETCHING, thread_name_prefix="fetches")

    @property
    def sizes(self) -> SizeRule:
        """Sizes as the server was told."""
        return self._sizes

    async def read(
        self, given: Sequence[GivenImage], settings: Mapping[str, Any], scope: str
    ) -> list[ReadImage]:
        """Read a request's pictures in threads, all at once.

        Args:
            given: The pictures.
            settings: The request's ``mm_processor_kwargs``.
            scope: Of whoever may share what is remembered.

        Raises:
            UserInputError: One cannot be read; it names which.
        """
        sizes = self._sizes.with_settings(settings)
        return list(await asyncio.gather(*(self._read_one(image, sizes, scope) for image in given)))

    async def _read_one(self, image: GivenImage, sizes: SizeRule, scope: str) -> ReadImage:
        loop = asyncio.get_running_loop()
        fetched = None
        if image.origin is not None and image.origin.address is not None:
            fetch = _placed(image, self._fetcher.fetch, image.origin.address)
            fetched = await loop.run_in_executor(self._fetchers, fetch)
        read = _placed(image, self._decode, image, sizes, scope, fetched)
        return await loop.run_in_executor(self._decoders, read)

    def read_now(
        self, given: Sequence[GivenImage], settings: Mapping[str, Any], scope: str = ""
    ) -> list[ReadImage]:
        """Read pictures, and wait: see ``read``."""
        sizes = self._sizes.with_settings(settings)
        waiting: list[Future[ReadImage]] = []
        for image in given:
            address = None if image.origin is None else image.origin.address
            fetched = None if address is None else _placed(image, self._fetcher.fetch, address)()
            read = _placed(image, self._decode, image, sizes, scope, fetched)
            waiting.append(self._decoders.submit(read))
        return [future.result() for future in waiting]

    def _decode(
        self, given: GivenImage, sizes: SizeRule, scope: str, fetched: bytes | None
    ) -> ReadImage:
        sizes = sizes.with_detail(given.detail)
        if given.image is not None:
            return self._resize(pixels_of(given.image, self._rules), sizes)
        digest, data = self._find_bytes(given, scope, fetched)
        asked = f"{sizes}|{self._rules}|{scope}".encode()
        key = hashlib.sha256(digest + asked).digest()
        found = self.memo.find(key)
        if found is None:
            if data is None:
                raise UserInputError(
                    f"has the uuid {given.uuid!r} alone, and what it stood for is not here any "
                    "more: send the picture again",
                    "messages",
                )
            found = self._read_file(data, sizes)
            self.memo.add(key, found)
        # Only what could be read gets a name.
        if given.uuid is not None and not self.memo.name(scope, given.uuid, digest):
            raise UserInputError(
                f"has the uuid {given.uuid!r}, under which another picture was sent before: give "
                "each picture a uuid of its own",
                "messages",
            )
        return found

    def _find_bytes(
        self, given: GivenImage, scope: str, fetched: bytes | None
    ) -> tuple[bytes, bytes | None]:
        """The digest of a picture's file, and the file; None: only its name came."""
        data = fetched
        if given.origin is not None and given.origin.data is not None:
            data = decode_base64(given.origin.data)
        elif given.origin is not None and given.origin.path is not None:
            data = read_local_file(given.origin.path, self._folder)
        if data is not None:
            return hashlib.sha256(data).digest(), data
        digest = self.memo.find_named(scope, given.uuid or "")
        if digest is None:
            raise UserInputError(
                f"has the uuid {given.uuid!r} alone, and no picture was sent under it: send the "
                "picture",
                "messages",
            )
        return digest, None

    def _read_file(self, data: bytes, sizes: SizeRule) -> ReadImage:
        if self._processes is None:
            return self._resize(decode_image(data, self._rules), sizes)
        found, size = self._processes.decode(data, self._rules, sizes)
        pixels = np.frombuffer(found, np.uint8).reshape(size.height, size.width, 3)
        identifier = image_identity(pixels, size, self._family, self._tower)
        return ReadImage(identifier, size, found)

    def _resize(self, pixels: Any, sizes: SizeRule) -> ReadImage:
        height, width = pixels.shape[:2]
        size = sizes.fit(width, height)
        resized = resize(pixels, size, sizes.resample)
        identifier = image_identity(resized, size, self._family, self._tower)
        return ReadImage(identifier, size, resized.tobytes())

    def close(self) -> None:
        """Let the threads end."""
        self._decoders.shutdown(wait=False, cancel_futures=True)
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()


def _placed(image: GivenImage, work: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Work whose errors say which picture they are about."""

    def run() -> Any:
        try:
            return work(*args)
        except UserInputError as error:
            raise UserInputError(f"{image.where} {error}.", error.param) from error

    return run
