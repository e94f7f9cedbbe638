"""How much may be written over what a disk holds: what is overwritten unread wore it for nothing.

room      what is written where nothing was costs nothing else
reads     each byte that comes back lets so many be written over others
neither   only what was wanted twice within the folder's size is written: at the pace of the
          last writes it would have been read before its turn to go came
"""

from __future__ import annotations

from collections import OrderedDict

from vllm.v1.kv_offload.store.records import ObjectKey

# Bytes that may be written over others for each one that was read. With four, a chat through half a
# GiB wrote a third more and hit a point less.
_BYTES_PER_READ = 1
# Objects that are followed until they are wanted again.
_MAX_SEEN = 1 << 16


class Turnover:
    """Whether writing over what the disk holds has paid of late.

    Owns: what may still be written.
    """

    def __init__(self) -> None:
        self._size = 0
        self._left = 0

    def begin(self, size: int, used: int) -> None:
        """Take note of a folder.

        Args:
            size: Bytes of its limit.
            used: Bytes of what is there.
        """
        self._size, self._left = size, max(0, size - used)

    def note_read(self, num_bytes: int) -> None:
        """Take note of bytes that came back."""
        self._left = min(self._size, self._left + _BYTES_PER_READ * num_bytes)

    def spend(self, num_bytes: int) -> None:
        """Count a write."""
        self._left = max(0, self._left - num_bytes)

    @property
    def is_scarce(self) -> bool:
        """Whether only what was wanted twice shall be written."""
        return bool(self._size) and not self._left


class SeenObjects:
    """Objects that were wanted, the most recent ones of so many bytes.

    Owns: their names.
    """

    def __init__(self) -> None:
        self.max_bytes: int | None = None
        self._sizes: OrderedDict[ObjectKey, int] = OrderedDict()
        self._num_bytes = 0

    def add(self, key: ObjectKey, num_bytes: int) -> bool:
        """Note that an object is wanted; returns whether it was among those."""
        known = self._sizes.pop(key, None)
        self._sizes[key] = num_bytes
        self._num_bytes += num_bytes - (known or 0)
        while len(self._sizes) > _MAX_SEEN or (
            self.max_bytes is not None and self._num_bytes > self.max_bytes and len(self._sizes) > 1
        ):
            self._num_bytes -= self._sizes.popitem(last=False)[1]
        return known is not None

    def clear(self) -> None:
        """Forget them."""
        self._sizes.clear()
        self._num_bytes = 0
