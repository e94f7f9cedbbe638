"""Two server processes, played by two applications: what one keeps, the other finds."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from vllm.entrypoints.openai.diagnosis.fingerprint import owner_digest
from vllm.entrypoints.openai.peer_servers import PeerServers

_WAIT_S = 30.0


class Pair:
    """Applications of which the second is reached by the first.

    Attributes:
        asked: Who gets every request of a test.
        keeper: Who made the responses.
    """

    def __init__(self, serve: Callable[..., Any], folder: Path) -> None:
        self.asked, self.keeper = serve(), serve()
        self.peers = [PeerServers(str(folder), number, 2) for number in (1, 2)]
        for served, peers in zip((self.asked, self.keeper), self.peers, strict=True):
            served.app.state.peers = peers
        diagnoses = [served.app.state.diagnoses for served in (self.asked, self.keeper)]
        self.peers[1].start(self.keeper.app, diagnoses[1])
        diagnoses[0].set_peers(self.peers[0].find_fingerprint)

    async def store(self, **body: Any) -> dict[str, Any]:
        """Make a response in the second process."""
        reply = await self.keeper.client.post("/v1/responses", json={"input": "Hello", **body})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    async def stop(self) -> None:
        for peers in self.peers:
            await asyncio.wait_for(peers.stop(), _WAIT_S)


@pytest.fixture
async def pair(serve: Callable[..., Any], tmp_path: Path) -> AsyncIterator[Pair]:
    pair = Pair(serve, tmp_path)
    yield pair
    await pair.stop()


async def test_a_stored_response_is_found_wherever_it_is(pair: Pair) -> None:
    made = await pair.store()
    path = f"/v1/responses/{made['id']}"
    assert (await pair.asked.client.get(path)).json() == made
    items = (await pair.asked.client.get(f"{path}/input_items?limit=5&order=asc")).json()
    assert [item["role"] for item in items["data"]] == ["user"]
    refused = await pair.asked.client.post(f"{path}/cancel")
    assert (refused.status_code, "background" in refused.text) == (400, True)
    assert (await pair.asked.client.delete(path)).json()["deleted"] is True
    for served in (pair.asked, pair.keeper):
        assert (await served.client.get(path)).status_code == 404


async def test_a_request_is_compared_with_one_that_another_process_answered(pair: Pair) -> None:
    made = await pair.store()
    options = {"comparison_response_id": made["id"]}
    diagnoses = []
    for salt in (None, "other"):
        body = {"input": "Hello", "cache_salt": salt, "prompt_cache_options": options}
        reply = await pair.asked.client.post("/v1/responses", json=body)
        diagnoses.append(reply.json()["prompt_cache_diagnostics"]["type"])
    assert diagnoses == ["cache_hit", "comparison_response_not_found"]
    # Nobody but another process may ask for it.
    path = f"/peer/fingerprints/{made['id']}"
    owner = {"x-vllm-owner": owner_digest(None, None).hex()}
    assert (await pair.keeper.client.get(path, headers=owner)).status_code == 404


async def test_a_conversation_goes_on_where_it_is_kept(pair: Pair) -> None:
    made = await pair.store()
    body = {"input": "And then?", "previous_response_id": made["id"]}
    reply = await pair.asked.client.post("/v1/responses", json=body)
    assert reply.json()["previous_response_id"] == made["id"]
    body |= {"previous_response_id": reply.json()["id"], "stream": True}
    async with pair.asked.client.stream("POST", "/v1/responses", json=body) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = [
            json.loads(line[6:]) async for line in stream.aiter_lines() if line[:5] == "data:"
        ]
    assert events[-1]["type"] == "response.completed"
    del body["stream"]
    counted = await pair.asked.client.post("/v1/responses/input_tokens", json=body)
    assert counted.status_code == 200, counted.text
    assert pair.asked.engine.jobs == []
    assert len(pair.keeper.engine.jobs) == 3


async def test_what_nobody_keeps_is_not_found(pair: Pair) -> None:
    for name, path in (("resp_unknown", "resp_unknown?stream=false"), ("a b%?", "a%20b%25%3F")):
        reply = await pair.asked.client.get(f"/v1/responses/{path}")
        assert reply.status_code == 404
        assert name in reply.json()["error"]["message"]
    body = {"input": "And then?", "previous_response_id": "resp_unknown"}
    assert (await pair.asked.client.post("/v1/responses", json=body)).status_code == 404


async def test_a_process_that_is_gone_harms_nobody(pair: Pair) -> None:
    made = await pair.store()
    await pair.peers[1].stop()
    assert (await pair.asked.client.get(f"/v1/responses/{made['id']}")).status_code == 404
    own = (await pair.asked.client.post("/v1/responses", json={"input": "Hello"})).json()
    assert (await pair.asked.client.get(f"/v1/responses/{own['id']}")).json() == own


async def test_a_client_that_leaves_ends_its_request_there(pair: Pair) -> None:
    made = await pair.store()
    pair.keeper.engine.hold.clear()
    body = {"input": "And then?", "previous_response_id": made["id"]}
    asking = asyncio.create_task(pair.asked.client.post("/v1/responses", json=body))
    async with asyncio.timeout(_WAIT_S):
        while len(pair.keeper.engine.jobs) < 2:
            await asyncio.sleep(0.005)
        asking.cancel()
        while not pair.keeper.engine.num_left:
            await asyncio.sleep(0.005)
    pair.keeper.engine.hold.set()
