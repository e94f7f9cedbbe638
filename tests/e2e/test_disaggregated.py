"""Prefill and decode in processes of their own behind the example's proxy: the answers of one."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import NO_TLS, ServerProcess
from tests.ports import free_ports

_ROOT = Path(__file__).parents[2]
_PROXY = _ROOT / "examples" / "disaggregated" / "proxy.py"
_WAIT_S = 60.0
# Both draft, the server they are compared with does not: drafts change no answer.
_FLAGS = (
    *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'),
    *("--enable-prompt-tokens-details", "--max-model-len", "4096"),
)


class Disaggregated:
    """A prefill server, a decode server and the proxy; stops with the ``with`` block.

    Args:
        folder: Of their logs.
        environment: Of the servers.
        num_cores: Engine cores of each.
    """

    def __init__(self, folder: Path, environment: dict[str, str], num_cores: int) -> None:
        self.kv_port = free_ports(num_cores)
        flags = (*_FLAGS, "-dp", str(num_cores))
        self.prefill, self.decode = (
            ServerProcess(
                folder / f"{role}.txt", *flags, *self._transfer(role), environment=environment
            )
            for role in ("kv_producer", "kv_consumer")
        )
        self.url = f"http://127.0.0.1:{free_ports()}"
        self._proxy: subprocess.Popen[bytes] | None = None
        self._log = folder / "proxy.txt"

    def _transfer(self, role: str) -> tuple[str, str]:
        config = {"kv_connector": "TcpConnector", "kv_role": role, "kv_port": self.kv_port}
        return "--kv-transfer-config", json.dumps(config)

    def __enter__(self) -> "Disaggregated":
        self.prefill.__enter__()
        try:
            self.decode.__enter__()
        except BaseException:
            self.prefill.stop()
            raise
        with self._log.open("w") as log:
            command = [sys.executable, str(_PROXY), "--port", self.url.rsplit(":", 1)[1]]
            command += ["--prefill", self.prefill.url, "--decode", self.decode.url]
            self._proxy = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + _WAIT_S
        while not self._is_up():
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)
        return self

    def _is_up(self) -> bool:
        try:
            return httpx.get(self.url + "/health", timeout=60, verify=NO_TLS).status_code == 200
        except httpx.HTTPError:
            return False

    def __exit__(self, *exc: object) -> None:
        if self._proxy is not None:
            self._proxy.terminate()
            self._proxy.wait(120)
        self.decode.stop()
        self.prefill.stop()

    def wait_idle(self) -> None:
        """Both sides hold no block."""
        self.prefill.wait_idle(_WAIT_S)
        self.decode.wait_idle(_WAIT_S)

    @property
    def num_loaded(self) -> float:
        """Prompt tokens that came from the prefill server."""
        return self.decode.metric("vllm:external_prefix_cache_hits_total")


@pytest.fixture(scope="module")
def session_apart(
    tmp_path_factory: pytest.TempPathFactory, platform: str, platform_environment: dict[str, str]
) -> Iterator[Disaggregated]:
    """One set of processes per platform; on the CPU each server has two engine cores."""
    folder, num_cores = tmp_path_factory.mktemp("apart"), 2 if platform == "cpu" else 1
    with Disaggregated(folder, platform_environment, num_cores) as apart:
        yield apart


@pytest.fixture
def apart(session_apart: Disaggregated) -> Iterator[Disaggregated]:
    """The same; alive, and with nothing held, after every test."""
    yield session_apart
    for server in (session_apart.prefill, session_apart.decode):
        assert server.process.poll() is None, server.log
    session_apart.wait_idle()


def facts(rng: random.Random, count: int) -> str:
    """A prompt of the kind the embedded model knows how to go on with."""
    names = ("Ada", "Ben", "Cora", "Dan", "Eve", "Finn")
    places = ("Oslo", "Lima", "Cairo", "Delhi", "Quito", "Turin")
    told = [f"{rng.choice(names)} lives in {rng.choice(places)}." for _ in range(count)]
    return " ".join(told) + f" Where does {rng.choice(names)} live?"


def mixed_bodies(seed: int, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests of all kinds, by path."""
    rng = random.Random(seed)
    base = facts(rng, 40)
    bodies: list[tuple[str, dict[str, Any]]] = []
    for number in range(count):
        text = facts(rng, rng.choice((1, 5, 12, 40)))
        if number % 3 == 0:
            text = base[: rng.randrange(20, len(base))] + " " + text
        body: dict[str, Any] = {"temperature": 0, "max_tokens": rng.randrange(1, 16)}
        if number % 4 == 1:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
        else:
            path, body["prompt"] = "/v1/completions", text
        if number % 5 == 2:
            body |= {"n": 2, "temperature": 0.8, "seed": number}
        if number % 7 == 3:
            body["prompt"], path = [text, "And now?"], "/v1/completions"
            body.pop("messages", None)
        bodies.append((path, body))
    return bodies


def texts(reply: dict[str, Any]) -> list[Any]:
    """What was said, choice by choice."""
    return [
        choice.get("text", choice.get("message", {}).get("content")) for choice in reply["choices"]
    ]


def streamed(url: str, body: dict[str, Any]) -> str:
    """What was said in a stream of one completion."""
    said = ""
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=_WAIT_S) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                said += json.loads(line[6:])["choices"][0]["text"]
    return said


def test_mixed_requests_get_the_answers_of_one_server(
    apart: Disaggregated, server: ServerProcess, platform: str
) -> None:
    # The reference mode runs op by op, and is slow.
    bodies = mixed_bodies(seed=3, count=24 if platform == "cpu" else 8)

    def ask(entry: tuple[str, dict[str, Any]]) -> dict[str, Any]:
        url = apart.url + entry[0]
        reply = httpx.post(url, json=entry[1], timeout=_WAIT_S, verify=NO_TLS)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, bodies))
    for (path, body), reply in zip(bodies, found, strict=True):
        alone = server.post(path, body).json()
        assert texts(reply) == texts(alone), body
        assert reply["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
    assert apart.num_loaded > 200


def test_streams_and_clients_that_leave(apart: Disaggregated, server: ServerProcess) -> None:
    rng = random.Random(4)
    prompt = facts(rng, 30)
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    alone = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert streamed(apart.url + "/v1/completions", body) == alone
    long = {"prompt": facts(rng, 35), "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", apart.url + "/v1/completions", json=long, timeout=_WAIT_S) as reply:
        next(reply.iter_lines())
    # The fixture sees to it that both sides let go of it.


def test_what_came_is_hit_the_next_time(apart: Disaggregated) -> None:
    prompt = facts(random.Random(5), 40)
    details = []
    for _ in range(2):
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
        reply = httpx.post(apart.url + "/v1/completions", json=body, timeout=_WAIT_S).json()
        details.append(reply["usage"]["prompt_tokens_details"])
    assert details[0]["external_tokens"] > 200
    assert details[1]["cached_tokens"] == details[0]["cached_tokens"]
    assert "external_tokens" not in details[1]


def test_parameters_of_another_prompt_are_refused(apart: Disaggregated) -> None:
    rng = random.Random(6)
    wish = {"do_remote_decode": True}
    body = {"prompt": facts(rng, 20), "max_tokens": 1, "kv_transfer_params": wish}
    params = apart.prefill.post("/v1/completions", body).json()["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    other = {"prompt": facts(rng, 20), "max_tokens": 4, "kv_transfer_params": params}
    refused = apart.decode.post("/v1/completions", other)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "kv_transfer_params"
    assert apart.prefill.metric("vllm:kv_cache_usage_perc") > 0
    held = {"request_ids": [params["remote_request_id"]]}
    assert apart.prefill.post("/abort_requests", held).status_code == 200
    apart.prefill.wait_idle(_WAIT_S)
    # Too late, which is no error: it is computed.
    right = {**body, "max_tokens": 4, "kv_transfer_params": params}
    assert apart.decode.post("/v1/completions", right).status_code == 200


def test_a_server_without_transfers_says_so(server: ServerProcess) -> None:
    body = {"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}}
    refused = server.post("/v1/completions", body)
    assert refused.status_code == 400
    assert "--kv-transfer-config" in refused.json()["error"]["message"]


# What engines compare is worked out alike everywhere.
@pytest.mark.parametrize("platform", ["cpu"], indirect=True)
def test_a_decode_server_of_another_block_size_does_not_start(
    apart: Disaggregated, tmp_path: Path, platform_environment: dict[str, str]
) -> None:
    config = {"kv_connector": "TcpConnector", "kv_role": "kv_consumer"}
    config["kv_connector_extra_config"] = {"peers": [f"127.0.0.1:{apart.kv_port}"]}
    flags = (*_FLAGS, "--kv-transfer-config", json.dumps(config), "--block-size", "64")
    log = tmp_path / "log.txt"
    with (
        pytest.raises(RuntimeError, match="did not start"),
        ServerProcess(log, *flags, environment=platform_environment),
    ):
        pass
    (line,) = [line for line in log.read_text().splitlines() if "do not match" in line]
    assert "block_size is '32' at engine" in line
    assert "and '64' at engine" in line
