"""Files of this user's in folders that others may have reached first."""

import os
import stat
from pathlib import Path


def open_own(path: Path, *, writable: bool = True) -> int:
    """Open a regular file of this user's, made (0600) if it may be written and is not there.

    Raises:
        OSError: It cannot be opened, or is a link, a folder, a pipe or another user's.
    """
    mode = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
    # O_NONBLOCK: a pipe in a file's place must not hang its opener.
    flags = mode | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = os.open(path, flags, 0o600)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(handle)
        raise OSError(f"{path} is no regular file of this user's")
    return handle
