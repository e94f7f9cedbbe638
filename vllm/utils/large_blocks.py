"""Large blocks of memory go back to the system when they are freed, and not when it suits malloc.

glibc raises the size from which blocks are maps of their own with each large block that is freed.
Pictures then leave holes in the heap of every thread that decodes them: 500 MB after some thousand.
"""

import ctypes

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 256 * 1024


def return_large_blocks() -> bool:
    """Let blocks from 256 KiB on be maps of their own, in this process; whether that is possible.

    Each costs a system call: nothing beside what decoding a picture does with it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        # Another C library, which has ways of its own.
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))


def trim_heap() -> bool:
    """Give what was freed of the heap back to the system; whether there was any.

    Packing weights leaves holes, of 3% of what they take.
    """
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    return bool(malloc_trim(0))
