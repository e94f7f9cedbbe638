"""Who of several processes has ``--batch-dir``; knows nothing of the server."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from vllm.entrypoints.openai.server_args import BatchArgs
from vllm.exceptions import ConfigError


@dataclass(frozen=True, slots=True)
class BatchSeat:
    """What a process has to do with the batches of its command.

    Attributes:
        works: Whether it works on them; the others ask it.
        has_lock: Whether the command holds the folder for it.
    """

    works: bool = True
    has_lock: bool = False


ALONE = BatchSeat()
"""That of a command's only process."""


def lock_folder(args: BatchArgs) -> int:
    """Make the folder one's own until the file that is returned is closed by all who have it.

    Raises:
        ConfigError: The folder cannot be used, or another server uses it.
    """
    assert args.folder is not None
    folder = Path(args.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"--batch-dir {folder}: another server uses it. Give each its own."
        ) from None
    except OSError as error:
        raise ConfigError(f"--batch-dir {folder}: {error.strerror or error}.") from error
    return lock
