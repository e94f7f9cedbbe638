"""Memory in huge pages: of what is read from end to end, every small page would be looked up."""

import contextlib
import mmap

HUGE_PAGE_BYTES = 2 << 20


def map_huge_pages(num_bytes: int) -> mmap.mmap:
    """Returns fresh zeros that the system commits where they are first written.

    Small pages serve where it has no huge ones.

    Raises:
        MemoryError: The system does not give so much.
    """
    try:
        # Private: shared memory has no huge pages unless the whole system is set so.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no {num_bytes:,} bytes of memory: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel that was built without them refuses the advice.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
