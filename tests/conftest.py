"""What every test finds: loggers as imported, one torch thread, no deadline for examples."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.building import build_once
from tests.file_order import FileScheduling, sort_by_length

# What is collected stays to the end: looked through again and again, it took a fifth of the time
# until the first test, and more of each later look.
gc.disable()

# Torch reads it when it is loaded; servers that tests start inherit it. The models here are so
# small that a second thread costs more than it brings, and very much more where other work shares
# the cores: threads wait for each other after every operator.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How much is drafted hangs on what steps took: engines of the tests draft where they are told to.
os.environ.setdefault("VLLM_UNASKED_DRAFTS", "0")

# Most servers of the tests see no grammar.
os.environ.setdefault("VLLM_WARM_GRAMMARS", "0")

# How long an example takes says how busy the machine is, and every run draws the same examples.
settings.register_profile("any_machine", deadline=None, derandomize=True)
settings.load_profile("any_machine")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One of several processes: what takes longest first."""
    if hasattr(config, "workerinput"):
        items[:] = sort_by_length(items)


def pytest_collection_finish() -> None:
    """All modules are there."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Extensions complain of what is never given back."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    """A file stays together, as ``--dist loadfile`` means it, and a little more does."""
    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def _reset_loggers() -> None:
    # A web server of this process without an access log silences the logger of it for good.
    for name in ("vllm", "vllm_ascend", "uvicorn", "uvicorn.access", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.filters, logger.propagate = [], [], True
        logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True, scope="session")
def start_with_plain_logging() -> None:
    """Begin as imported."""
    _reset_loggers()


@pytest.fixture(autouse=True)
def keep_plain_logging() -> Iterator[None]:
    """Undo ``setup_logging``: a logger that does not propagate hides its lines from caplog."""
    yield
    _reset_loggers()


@pytest.fixture(scope="session")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist and the wheel, built once for all who look into them."""
    folder = tmp_path_factory.getbasetemp()
    # Of one run's test processes side by side, each has its folder below one folder.
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    return build_once(shared / "tree")
