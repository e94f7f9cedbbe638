"""What stands in a file's place is refused, and nobody waits for it."""

import os
from pathlib import Path

import pytest

from vllm.utils.own_files import open_own


def test_only_a_regular_file_of_this_user_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    with pytest.raises(FileNotFoundError):
        open_own(path, writable=False)
    os.close(open_own(path))
    assert path.stat().st_mode & 0o777 == 0o600
    link.symlink_to(path)
    os.mkfifo(pipe)
    for writable in (True, False):
        for other in (link, pipe, tmp_path):
            with pytest.raises(OSError, match=other.name):
                open_own(other, writable=writable)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(OSError, match="no regular file of this user's"):
        open_own(path)
