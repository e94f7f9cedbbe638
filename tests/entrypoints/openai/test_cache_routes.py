from typing import Any

import pytest

from tests.entrypoints.openai.conftest import Served

URL = "/v1/cache/prefixes"


async def test_a_prefix_is_computed_listed_and_forgotten(served: Served) -> None:
    made = await served.client.post(URL, json={"prompt": [1] * 9, "ttl": 60})
    assert made.status_code == 200, made.text
    body = made.json()
    assert body | {"id": ""} == {
        "id": "",
        "object": "cache.prefix",
        "num_tokens": 9,
        "pinned": True,
        "num_blocks": 3,
        "num_hits": 0,
        "expires_in": 60.0,
    }
    token_ids, params, *_ = served.engine.jobs[0]
    assert (token_ids, params.max_tokens) == ([1] * 9, 1)
    listed = await served.client.get(URL)
    assert listed.json() == {"object": "list", "data": [body]}
    gone = await served.client.delete(f"{URL}/{body['id']}")
    assert gone.json() == {"id": body["id"], "deleted": True, "object": "cache.prefix"}
    again = await served.client.delete(f"{URL}/{body['id']}")
    assert (again.status_code, again.json()["error"]["param"]) == (404, "prefix_id")
    assert (await served.client.get(URL)).json()["data"] == []


@pytest.mark.parametrize(
    ("body", "pinned"),
    [
        ({"tokens": [1, 2, 3]}, True),
        ({"prompt": "Hello", "pin": False}, False),
        ({"messages": [{"role": "system", "content": "You help."}], "pin": True}, True),
    ],
)
async def test_forms(served: Served, body: dict[str, Any], pinned: bool) -> None:
    made = await served.client.post(URL, json={**body, "cache_salt": "me"})
    assert made.status_code == 200, made.text
    assert (made.json()["pinned"], "expires_in" in made.json()) == (pinned, False)
    token_ids, *_, salt = served.engine.jobs[0]
    assert (made.json()["num_tokens"], salt) == (len(token_ids), "me")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "tokens": [1]}, "prompt"),
        ({"prompt": ["x", "y"]}, "prompt"),
        ({"prompt": "x", "ttl": 0}, "ttl"),
        ({"prompt": "x", "ttl": 1e9}, "ttl"),
        ({"prompt": "x", "ttl": "5m"}, "ttl"),
        ({"tokens": [10**9]}, "prompt"),
        ({"messages": []}, "messages"),
    ],
)
async def test_wrong_bodies(served: Served, body: dict[str, Any], param: str) -> None:
    response = await served.client.post(URL, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert served.engine.jobs == []


async def test_what_cannot_be_kept_is_told(served: Served) -> None:
    served.engine.keeps = False
    response = await served.client.post(URL, json={"prompt": "x"})
    assert response.status_code == 400
    assert "cannot be kept" in response.json()["error"]["message"]


async def test_behind_the_key(serve: Any) -> None:
    served = serve(api_keys=("secret",))
    for send in (served.client.get(URL), served.client.post(URL, json={"prompt": "x"})):
        assert (await send).status_code == 401
    key = {"Authorization": "Bearer secret"}
    assert (await served.client.get(URL, headers=key)).status_code == 200
