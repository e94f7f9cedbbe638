"""One server per platform, and clients of it: every test runs on the CPU and in reference mode."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.scripted_checkpoint import write_scripted_v4
from tests.e2e.server_process import NO_TLS, ServerProcess
from vllm import LLM
from vllm.platforms.resolve import get_current_platform

_D = "｜DSML｜"
# Every piece stands once, and none looks like a tag: grammars take <...> for special. Without
# thinking the prompt ends with </think>: the script goes on there.
AGENT_SCRIPT = {
    "<think>": [
        "I look it up.",
        "</think>",
        "One mo",
        "ment.",
        f"\n\n<{_D}tool_calls>\n<{_D}invoke",
        ' name="look_up">\n<',
        f'{_D}parameter name="key" string="true">',
        "Bérg",
        "en 🏔",
        f'</{_D}parameter>\n<{_D}parameter name="days" string="false">3',
        f"</{_D}parameter>\n</",
        f"{_D}invoke>\n</{_D}tool_calls",
        ">",
        "<｜end▁of▁sentence｜>",
    ]
}
# The Ascend tree on CPU tensors; fp32 pages and float index keys, so the same tokens are said.
PLATFORMS = {"cpu": {"VLLM_ASCEND_REFERENCE": "0"}, "ascend": {"VLLM_ASCEND_REFERENCE": "1"}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts real processes."""
    for item in items:
        if "tests/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", params=list(PLATFORMS))
def platform(request: pytest.FixtureRequest) -> str:
    """The platform's name."""
    return str(request.param)


@pytest.fixture(scope="session")
def platform_environment(platform: str) -> dict[str, str]:
    """The variables that select it."""
    return PLATFORMS[platform]


@pytest.fixture(scope="session")
def find_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], ServerProcess]]:
    """Finds the shared server of a platform: starts with the first test that asks, and stays.

    A fixture of a parameter ends when the next file begins with its first parameter again.
    """
    with contextlib.ExitStack() as servers:

        @functools.cache
        def find(platform: str) -> ServerProcess:
            log_path = tmp_path_factory.mktemp("server") / "log.txt"
            server = ServerProcess(log_path, environment=PLATFORMS[platform])
            return servers.enter_context(server)

        yield find


@pytest.fixture(scope="session")
def cpu_server(find_server: Callable[[str], ServerProcess]) -> ServerProcess:
    """The shared server on a CPU."""
    return find_server("cpu")


@pytest.fixture(scope="session")
def session_server(find_server: Callable[[str], ServerProcess], platform: str) -> ServerProcess:
    """The shared server of a platform."""
    return find_server(platform)


@pytest.fixture
def server(
    session_server: ServerProcess, request: pytest.FixtureRequest
) -> Iterator[ServerProcess]:
    """The shared server; alive and idle after every test, its log shown otherwise."""
    yield session_server
    assert session_server.process.poll() is None, session_server.log
    try:
        session_server.wait_idle()
    except AssertionError:
        print(session_server.log[-20_000:])
        raise


@pytest.fixture(scope="session")
def session_scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The shared server of a model called "agent", which says what AGENT_SCRIPT says."""
    folder = tmp_path_factory.mktemp("scripted")
    write_scripted_v4(folder / "checkpoint", AGENT_SCRIPT)
    environment = {"VLLM_ASCEND_REFERENCE": "0"}
    flags = ("--served-model-name", "agent", "--max-model-len", "8192")
    model = str(folder / "checkpoint")
    with ServerProcess(folder / "log.txt", *flags, environment=environment, model=model) as server:
        yield server


@pytest.fixture
def scripted(session_scripted: ServerProcess) -> Iterator[ServerProcess]:
    """The same; alive and idle after every test."""
    yield session_scripted
    assert session_scripted.process.poll() is None, session_scripted.log
    session_scripted.wait_idle()


@pytest.fixture
def start_twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], LLM]]:
    """Starts an engine of this process on a CPU, which is soon there, to compare a server with."""
    for name in ("VLLM_ASCEND_REFERENCE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "0")
    get_current_platform.cache_clear()
    with contextlib.ExitStack() as engines:

        def start(model: Path) -> LLM:
            sizes = {"max_model_len": 1024, "kv_cache_memory_bytes": 32 << 20}
            return engines.enter_context(LLM(model, block_size=32, **sizes))

        yield start
    get_current_platform.cache_clear()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    http = openai.DefaultHttpxClient(verify=NO_TLS)
    url = server.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
        yield client
