"""A server that several tenants share: keys, limits, caches of their own, metrics."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import ServerProcess

TENANTS = {
    "tenants": [
        {"name": "fast", "keys": ["sk-fast"], "weight": 3},
        {"name": "own", "keys": ["sk-own"], "own_cache": True},
        {"name": "few", "keys": ["sk-few"], "requests_per_minute": 2},
        {"name": "small", "keys": ["sk-small"], "tokens_per_minute": 10},
    ]
}
PROMPT = "A story that is long enough to be cached. " * 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "tenants.json").write_text(json.dumps(TENANTS))
    flags = ("--tenants", str(folder / "tenants.json"), "--admin-api-key", "sk-admin")
    with ServerProcess(Path(folder) / "log", *flags) as server:
        yield server


def complete(server: ServerProcess, key: str, prompt: str = "Hello", **body: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **body}
    headers = {"Authorization": f"Bearer {key}"}
    return server.post("/v1/completions", body, headers=headers)


def test_a_key_is_needed_and_names_a_tenant(server: ServerProcess):
    assert complete(server, "sk-none").status_code == 401
    assert complete(server, "sk-fast").status_code == 200
    assert complete(server, "sk-admin").status_code == 200
    assert server.metric("vllm:tenant_requests_total", tenant="fast") == 1
    assert server.metric("vllm:tenant_requests_total", tenant="default") == 1
    assert server.metric("vllm:tenant_tokens_total", tenant="fast", kind="output") == 2
    assert server.metric("vllm:tenant_time_to_first_token_seconds_count", tenant="fast") == 1


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_cache_of_ones_own_serves_nobody_else(server: ServerProcess):
    assert cached(complete(server, "sk-fast", PROMPT)) == 0
    assert cached(complete(server, "sk-fast", PROMPT)) > 0
    assert cached(complete(server, "sk-own", PROMPT)) == 0
    assert cached(complete(server, "sk-own", PROMPT)) > 0
    # Nor does a salt of the client's lead there.
    assert cached(complete(server, "sk-fast", PROMPT, cache_salt="own")) == 0


def test_limits_are_told_in_each_apis_own_words(server: ServerProcess):
    for _ in range(2):
        assert complete(server, "sk-few").status_code == 200
    refused = complete(server, "sk-few", stream=True)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("RateLimitError", "rate_limit_exceeded")
    assert "'few' exceeds requests_per_minute=2" in error["message"]
    message = {
        "model": "deepseek-v4",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": "Hello"}],
    }
    refused = server.post("/v1/messages", message, headers={"x-api-key": "sk-few"})
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert "retry-after" in refused.headers
    assert server.metric("vllm:tenant_rejected_total", tenant="few") == 2
    # Answers count too: the first prompt fits, and leaves a debt.
    assert complete(server, "sk-small", "Hi", max_tokens=12, ignore_eos=True).status_code == 200
    refused = complete(server, "sk-small", "Hi")
    assert refused.status_code == 429
    assert "tokens_per_minute=10" in refused.json()["error"]["message"]


def test_the_operators_view_hides_keys(server: ServerProcess):
    headers = {"Authorization": "Bearer sk-admin"}
    text = httpx.get(f"{server.url}/server_info", headers=headers, timeout=60).text
    tenants = json.loads(text)["vllm_config"]["scheduler_config"]["tenants"]
    assert tenants["by_key"] == "(hidden)"
    assert tenants["tenants"]["fast"]["weight"] == 3
