"""Python's collector of cycles, in the processes that are a server's own."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Import within the block what stays to the end of the process.

    The collector looks through none of it: not while it is imported, which takes a sixth less time,
    not in a pause of the service, and not when the process ends, where torch takes half a second.
    It is for processes of our own: in one that a program of others runs, all that this has by then
    would stay, too.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
