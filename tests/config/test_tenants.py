"""Files of tenants: what is read, and how each wrong one is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm.config.tenants import DEFAULT_TENANT, Tenant, digest_key, read_tenants
from vllm.exceptions import ConfigError

FILE = f"""
token_weights: {{input: 1, cached: 0.25, output: 3}}
tenants:
  - name: chat
    keys: [sk-chat-1, sk-chat-2]
    weight: 3
    requests_per_minute: 600
    cache_guaranteed: 0.25
    own_cache: true
  - name: batch
    keys: ["sha256:{digest_key("sk-batch")}"]
    priority: 1
    tokens_per_minute: 1000
    max_queued_requests: 8
    cache_at_most: 0.5
"""


def write(folder: Path, content: Any) -> str:
    path = folder / "tenants.yaml"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_file_is_read_and_keeps_no_key(tmp_path: Path):
    config = read_tenants(write(tmp_path, FILE))
    chat = Tenant("chat", 3, requests_per_minute=600, cache_guaranteed=0.25, has_own_cache=True)
    assert config.tenants["chat"] == chat
    assert config.tenants["batch"].tokens_per_minute == 1000
    assert config.by_key[digest_key("sk-chat-2")] == "chat"
    assert config.by_key[digest_key("sk-batch")] == "batch"
    assert "sk-" not in repr(config) + repr(config.by_key)
    assert config.token_weights.cached == 0.25
    # Nobody is served without a key, but programs' requests have a tenant all the same.
    assert not config.is_open
    assert config.find(None).name == config.find("gone").name == DEFAULT_TENANT


def test_json_is_read_too_and_default_opens_the_server(tmp_path: Path):
    config = read_tenants(write(tmp_path, {"tenants": [{"name": "default", "weight": 0.5}]}))
    assert config.is_open
    assert config.find(None).weight == 0.5


def entry(**fields: Any) -> dict[str, Any]:
    return {"name": "a", "keys": ["k"], **fields}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tenants: [", "neither YAML nor JSON .line 1"),
        ("[]", "Expected `object`"),
        ("{}", "missing required field `tenants`"),
        ({"tenants": []}, "0 entries"),
        ({"tenants": [entry(wieght=2)]}, "unknown field `wieght` - at `\\$.tenants\\[0\\]`"),
        ({"tenants": [entry(weight=0)]}, "> 0.* - at `\\$.tenants\\[0\\].weight`"),
        ({"tenants": [entry(weight="2")]}, "Expected `float`"),
        ({"tenants": [entry(requests_per_minute=0)]}, ">= 1.*requests_per_minute"),
        ({"tenants": [entry(cache_at_most=1.5)]}, "<= 1.*cache_at_most"),
        ({"tenants": [entry(cache_guaranteed=0.6, cache_at_most=0.5)]}, "is above its"),
        ({"tenants": [entry(keys=[])]}, "has 0 keys: give at least one"),
        ({"tenants": [entry(name="default")]}, "leave 'keys' out"),
        ({"tenants": [entry(name="a b")]}, "letters, digits"),
        ({"tenants": [entry(), entry(keys=["l"])]}, "'a' is there twice"),
        ({"tenants": [entry(), {"name": "b", "keys": ["k"]}]}, "key 1 of 'b' is also one of 'a'"),
        ({"tenants": [entry(keys=[" k"])]}, "space around"),
        ({"tenants": [entry(keys=["sha256:12"])]}, "64 hex digits"),
        (
            {
                "tenants": [
                    entry(cache_guaranteed=0.6),
                    {"name": "b", "keys": ["l"], "cache_guaranteed": 0.5},
                ]
            },
            "sum to 1.1",
        ),
        (
            {"tenants": [entry()], "token_weights": {"input": 0, "cached": 0, "output": 0}},
            "all 0",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, content: Any, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        read_tenants(write(tmp_path, content))
    assert str(caught.value).startswith("--tenants ")


def test_no_error_shows_a_key(tmp_path: Path):
    secret = "sk-very-secret"
    for content in (
        f"tenants: [{{name: a, keys: [{secret}]]",
        {"tenants": [entry(keys=[secret]), {"name": "b", "keys": [secret]}]},
        {"tenants": [entry(keys=[f" {secret}"])]},
        {"tenants": [entry(keys=[f"sha256:{secret}"])]},
    ):
        with pytest.raises(ConfigError) as caught:
            read_tenants(write(tmp_path, content))
        assert secret not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tenants(str(tmp_path / "none.yaml"))
