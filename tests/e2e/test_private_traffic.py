"""Private requests among others, thinned; ``private_traffic`` has the whole of it."""

from pathlib import Path

import pytest

from tests.e2e import private_traffic


def test_nothing_of_private_requests_is_found_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # put back afterwards
    told = private_traffic.run(tmp_path, 20, num_asked=10)
    assert told["private_hashes"] > 20
    assert told["tokens_hit_that_others_share"] > 0
