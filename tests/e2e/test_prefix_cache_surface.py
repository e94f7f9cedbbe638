"""What users see of the prefix cache: usage, counters, cache_config_info, the log, the reset."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server_process import ServerProcess

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODEL = "deepseek-v4"


@pytest.fixture(scope="module")
def dev_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("surface") / "log.txt"
    flags = ("--enable-prompt-tokens-details", "--max-model-len", "1024")
    with ServerProcess(log, *flags, environment={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        yield server


@pytest.fixture
def dev_client(dev_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=dev_server.url + "/v1", api_key="k", max_retries=0) as client:
        yield client


def prompt_of(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(length)]


class Counters:
    """The prefix cache's counters, as changes since the last look."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._before = self._read()

    def _read(self) -> dict[str, int]:
        self._server.wait_idle()
        counts = {}
        for line in self._server.get("/metrics").text.splitlines():
            match = re.match(r"vllm:prefix_cache_(\w+)_total\{(.*)\} (\S+)", line)
            if match:
                reason = re.search(r'reason="(\w+)"', match[2])
                counts[reason[1] if reason else match[1]] = int(float(match[3]))
        return counts

    def take(self) -> dict[str, int]:
        """Return what changed, zeros left out."""
        now = self._read()
        changes = {name: now[name] - self._before[name] for name in now}
        self._before = now
        return {name: change for name, change in changes.items() if change}


def check_sum(usage: dict[str, Any]) -> dict[str, int]:
    """Hits and reasons are the prompt, exactly; return the counters they stand for."""
    details = usage["prompt_tokens_details"]
    misses = details["miss_tokens"]
    assert details["cached_tokens"] + sum(misses.values()) == usage["prompt_tokens"]
    assert details["cached_tokens"] <= details["dense_match_tokens"] <= usage["prompt_tokens"]
    hits = {"hits": details["cached_tokens"]} if details["cached_tokens"] else {}
    return {"queries": usage["prompt_tokens"], **hits, **misses}


def test_reasons_of_completions_are_the_counters(dev_server: ServerProcess) -> None:
    counters = Counters(dev_server)
    first = prompt_of(1, 330)
    # The same; parted from it where no checkpoint was kept; scored for the first time; short.
    steps: list[tuple[list[int], dict[str, Any], dict[str, Any]]] = [
        (first, {}, {"first_seen": 320, "above_last_boundary": 10}),
        (first, {}, {"above_last_boundary": 10}),
        (first[:160] + prompt_of(2, 40), {}, {"window_not_retained": 160}),
        (first, {"prompt_logprobs": 0}, {"bypassed": 320, "above_last_boundary": 10}),
        (prompt_of(3, 20), {}, {"above_last_boundary": 20}),
    ]
    for prompt, fields, reasons in steps:
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
        usage = dev_server.post(COMPLETIONS, body).json()["usage"]
        expected = check_sum(usage)
        misses = usage["prompt_tokens_details"]["miss_tokens"]
        assert misses.items() >= reasons.items()
        assert counters.take() == expected


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_reads_reasons_of_a_chat(
    stream: bool, dev_client: openai.OpenAI, dev_server: ServerProcess
) -> None:
    text = " ".join(f"chat{stream}{i}" for i in range(90))
    counters = Counters(dev_server)
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    cached = []
    for _ in range(2):
        answer: Any = dev_client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": text}],
            max_tokens=3,
            stream=stream,
            **fields,
        )
        usages = [chunk.usage for chunk in answer if chunk.usage] if stream else [answer.usage]
        (usage,) = usages
        assert counters.take() == check_sum(usage.model_dump())
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, (usage.prompt_tokens - 1) // 32 * 32]


def test_a_streamed_completion_ends_with_the_reasons(
    dev_client: openai.OpenAI, dev_server: ServerProcess
) -> None:
    counters = Counters(dev_server)
    stream = dev_client.completions.create(
        model=MODEL,
        prompt=prompt_of(4, 200),
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    *_, chunk, last = list(stream)
    assert chunk.usage is not None
    assert last.usage is not None
    assert last.choices == []
    assert chunk.usage.prompt_tokens_details == last.usage.prompt_tokens_details
    assert counters.take() == check_sum(last.usage.model_dump())


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_counts_once_whatever_n(n: int, dev_server: ServerProcess) -> None:
    """Usage and counters tell of the cache as the first answer met it, for every prompt."""
    counters = Counters(dev_server)
    prompts_before = dev_server.metric("vllm:prompt_tokens_total")
    cached_before = dev_server.metric("vllm:prompt_tokens_cached_total")
    prompts = [prompt_of(10 * n, 100), prompt_of(10 * n + 1, 70)]
    cached = []
    for _ in range(2):
        body = {"prompt": prompts, "n": n, "max_tokens": 2, "temperature": 1.0}
        answer = dev_server.post(COMPLETIONS, body).json()
        assert len(answer["choices"]) == 2 * n
        assert answer["usage"]["prompt_tokens"] == 170
        assert counters.take() == check_sum(answer["usage"])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 96 + 64]
    assert dev_server.metric("vllm:prompt_tokens_total") - prompts_before == 340
    assert dev_server.metric("vllm:prompt_tokens_cached_total") - cached_before == 160


def test_random_traffic_keeps_the_books(dev_server: ServerProcess) -> None:
    """The sum of all usages is the change of the counters; queries are hits and misses."""
    counters = Counters(dev_server)
    draw = random.Random(7)
    known = [prompt_of(500, 300)]
    expected: dict[str, int] = {}
    for seed in range(25):
        base = draw.choice(known)
        prompt = base[: draw.randrange(1, len(base) + 1)] + prompt_of(seed, draw.randrange(90))
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": draw.randrange(1, 6)}
        if draw.random() < 0.2:
            body["n"] = 2
        if draw.random() < 0.2:
            body["cache_salt"] = f"salt{seed % 2}"
        for name, count in check_sum(dev_server.post(COMPLETIONS, body).json()["usage"]).items():
            expected[name] = expected.get(name, 0) + count
        known.append(prompt)
    changes = counters.take()
    assert changes == expected
    assert changes.pop("queries") == sum(changes.values())
    assert changes["hits"] > 0


def test_cache_config_info_states_what_can_be_reused(dev_server: ServerProcess) -> None:
    page = dev_server.get("/metrics").text
    (line,) = [line for line in page.splitlines() if line.startswith("vllm:cache_config_info{")]
    assert line.endswith("} 1.0")
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    assert labels["smallest_reusable_prefix_tokens"] == labels["cache_hit_alignment_tokens"] == "32"
    assert labels["prefix_cache_retention_interval"] == "auto"
    assert labels["retention"] == (
        "window state where prompts and answers end and where prompts part (policy auto)"
    )
    assert labels["block_size"] == labels["hash_block_size"] == "32"
    assert labels["enable_prefix_caching"] == "True"
    assert labels["prefix_caching_hash_algo"] == "sha256"
    assert int(labels["num_gpu_blocks"]) > 100
    assert (labels["engine"], labels["model_name"]) == ("0", MODEL)


def test_the_log_states_what_can_be_reused(dev_server: ServerProcess) -> None:
    assert (
        "Smallest reusable prefix: 32 tokens. Kept for reuse: window state where prompts and "
        "answers end and where prompts part (policy auto)." in dev_server.log
    )
    # What is stated is true: one unit and the token that is always computed.
    for length, expected in ((33, 32), (32, 0)):
        prompt = prompt_of(600 + length, length)
        for cached in (0, expected):
            body = {"prompt": prompt, "max_tokens": 1}
            usage = dev_server.post(COMPLETIONS, body).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached


def test_reset_forgets_and_refuses_while_in_use(dev_server: ServerProcess) -> None:
    prompt = prompt_of(700, 100)

    def cached() -> int:
        usage = dev_server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1}).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached()] == [0, 96]
    dev_server.wait_idle()
    assert dev_server.post("/reset_prefix_cache", None).json() == {"success": True}
    assert [cached(), cached()] == [0, 96]
    with openai.OpenAI(base_url=dev_server.url + "/v1", api_key="k") as client:
        stream = client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=400,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        next(stream)
        assert dev_server.post("/reset_prefix_cache", None).json() == {"success": False}
        forced = dev_server.post("/reset_prefix_cache?reset_running_requests=true", None)
        assert forced.json() == {"success": True}
        # The running request computes again, and goes on.
        *_, last = stream  # a client that is slow gets several tokens at once
        assert last.usage is not None
        assert last.usage.completion_tokens == 400
    assert dev_server.get("/server_info").json()["vllm_config"]["cache_config"]["block_size"] == 32


def test_without_the_flag_and_the_variable(server: ServerProcess, tmp_path: Path) -> None:
    usage = server.post(COMPLETIONS, {"prompt": prompt_of(800, 40), "max_tokens": 1}).json()[
        "usage"
    ]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    for response in (server.post("/reset_prefix_cache", None), server.get("/server_info")):
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "NotFoundError"


def test_without_caching_every_token_is_bypassed(tmp_path: Path) -> None:
    flags = ("--no-enable-prefix-caching", "--enable-prompt-tokens-details")
    with ServerProcess(tmp_path / "log.txt", *flags) as server:
        counters = Counters(server)
        for _ in range(2):
            body = {"prompt": prompt_of(900, 100), "max_tokens": 1}
            usage = server.post(COMPLETIONS, body).json()["usage"]
            assert usage["prompt_tokens_details"] == {
                "cached_tokens": 0,
                "dense_match_tokens": 0,
                "miss_tokens": {"bypassed": 100},
            }
            assert counters.take() == {"queries": 100, "bypassed": 100}
        assert "Prefix caching is off." in server.log
        page = server.get("/metrics").text
        assert 'smallest_reusable_prefix_tokens="None"' in page
        assert 'retention="prefix caching is off"' in page


def test_a_second_conversation_hits_the_system_prompt_at_once(dev_server: ServerProcess) -> None:
    """The chat's format tells where the system prompt ends: nobody must miss there first."""
    system = " ".join(f"rule{i}" for i in range(150))
    hits = []
    for question in ("What is asked first, by one?", "Another thing, by somebody else"):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": 2, "temperature": 0}
        usage = dev_server.post(CHAT, body).json()["usage"]
        check_sum(usage)
        hits.append(usage["prompt_tokens_details"]["cached_tokens"])
    num_system = dev_server.post("/tokenize", {"prompt": system}).json()["count"]
    assert hits[0] == 0
    # Down to the last multiple of 128 in it, where a checkpoint is cheap.
    assert hits[1] >= num_system // 128 * 128 > 0


def test_a_kept_prefix_is_hit_and_forgotten(dev_server: ServerProcess) -> None:
    prefix = prompt_of(77, 500)
    kept = dev_server.post("/v1/cache/prefixes", {"tokens": prefix, "ttl": 600}).json()
    assert (kept["pinned"], kept["num_hits"]) == (True, 0)
    assert kept["num_tokens"] >= 480
    body = {"prompt": [*prefix, *prompt_of(78, 40)], "max_tokens": 2}
    usage = dev_server.post(COMPLETIONS, body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 480
    (listed,) = dev_server.get("/v1/cache/prefixes").json()["data"]
    assert (listed["id"], listed["num_hits"]) == (kept["id"], 1)
    assert dev_server.post("/v1/cache/prefixes", {"tokens": [1, 2, 3]}).status_code == 400
    url = f"{dev_server.url}/v1/cache/prefixes/{kept['id']}"
    assert httpx.delete(url, timeout=60).json()["deleted"]
    assert httpx.delete(url, timeout=60).status_code == 404
    assert dev_server.get("/v1/cache/prefixes").json()["data"] == []
