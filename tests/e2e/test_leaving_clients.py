"""Clients with long texts that leave: others pass them, and nothing of theirs goes on.

Assertions are about what comes first and what ends, not about how long it takes.
"""

import asyncio
import re
from pathlib import Path

import httpx

from tests.e2e.server_process import NO_TLS, ServerProcess

NUM_CLIENTS = 10
# Counted, not answered, so that they are read to the end: several seconds of work each.
LONG = {"messages": [{"role": "user", "content": "The quick brown fox; x = y + 1. " * 60_000}]}
SHORT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
_DROPPED = re.compile(r"^vllm:dropped_requests_total (\S+)$", re.MULTILINE)


async def _leave(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120, verify=NO_TLS) as client:
        waiting = [
            asyncio.create_task(client.post("/v1/messages/count_tokens", json=LONG))
            for _ in range(NUM_CLIENTS)
        ]
        # All are there before the next one comes.
        while int((await client.get("/load")).json()["server_load"]) < NUM_CLIENTS:
            assert not all(task.done() for task in waiting)
        answer = await client.post("/v1/chat/completions", json=SHORT)
        assert answer.status_code == 200
        assert (await client.get("/health")).status_code == 200
        left = [task for task in waiting if not task.done()]
        assert left, "the short question waited for all long texts"
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        # Whoever left is forgotten, though a thread may still be at one text.
        while (await client.get("/load")).json()["server_load"]:
            assert (await client.post("/v1/chat/completions", json=SHORT)).status_code == 200
        found = _DROPPED.search((await client.get("/metrics")).text)
        assert found is not None
        assert float(found[1]) == len(left)


def test_who_leaves_keeps_nobody_waiting(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "log", "--max-model-len", "1024") as server:
        asyncio.run(_leave(server.url))
        # Nor does the server stay for the texts that nobody waits for.
        assert server.stop() == 0, server.log
