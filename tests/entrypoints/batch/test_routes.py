"""``/v1/files`` and ``/v1/batches`` by HTTP, over a fake engine."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai.types
import pytest
from prometheus_client import CollectorRegistry

from tests.entrypoints.openai.conftest import Served
from vllm.config.tenants import BATCH_TENANT, Tenant, TenantsConfig, digest_key, with_batch_tenant
from vllm.entrypoints.batch.folder_lock import ALONE
from vllm.entrypoints.batch.lifecycle import start_batches
from vllm.entrypoints.batch.wiring import add_batches
from vllm.entrypoints.openai.api_keys import InnerKey, KeyGuard
from vllm.entrypoints.openai.app import build_app
from vllm.entrypoints.openai.server_args import BatchArgs, ServerArgs
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import ConfigError

CHATS = "/v1/chat/completions"


@pytest.fixture
async def served(serve: Callable[..., Served], tmp_path: Path) -> AsyncIterator[Served]:
    """An application with a folder for batches, which are worked on."""
    served = serve(
        served_model={"max_model_len": 512}, batch=BatchArgs(folder=str(tmp_path / "batches"))
    )
    start_batches(served.app)
    yield served
    await served.app.state.batches.stop()


def make_lines(count: int, **change: Any) -> bytes:
    rows = []
    for i in range(count):
        body = {"model": "tiny", "messages": [{"role": "user", "content": f"{i}"}], "max_tokens": 2}
        rows.append({"custom_id": f"c{i}", "method": "POST", "url": CHATS, "body": body | change})
    return b"\n".join(json.dumps(row).encode() for row in rows)


async def upload(served: Served, content: bytes, **fields: str) -> openai.types.FileObject:
    reply = await served.client.post(
        "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch", **fields}
    )
    assert reply.status_code == 200, reply.text
    return openai.types.FileObject.model_validate(reply.json(), strict=True)


async def create(served: Served, file_id: str, **fields: Any) -> openai.types.Batch:
    body = {"input_file_id": file_id, "endpoint": CHATS, "completion_window": "24h", **fields}
    reply = await served.client.post("/v1/batches", json=body)
    assert reply.status_code == 200, reply.text
    return openai.types.Batch.model_validate(reply.json(), strict=True)


async def ended(served: Served, batch_id: str) -> openai.types.Batch:
    async with asyncio.timeout(20):
        while True:
            reply = await served.client.get(f"/v1/batches/{batch_id}")
            batch = openai.types.Batch.model_validate(reply.json(), strict=True)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.01)


async def test_a_file_is_answered(served: Served) -> None:
    content = make_lines(3) + b"\n" + make_lines(4, max_tokens=-1).splitlines()[3]
    file = await upload(served, content)
    assert (file.bytes, file.filename, file.purpose) == (len(content), "in.jsonl", "batch")
    kept = await served.client.get(f"/v1/files/{file.id}/content")
    assert kept.content == content
    batch = await ended(served, (await create(served, file.id, metadata={"a": "b"})).id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 1)
    assert batch.output_file_id is not None
    output = await served.client.get(f"/v1/files/{batch.output_file_id}/content")
    rows = [json.loads(raw) for raw in output.text.splitlines()]
    assert sorted(row["custom_id"] for row in rows) == ["c0", "c1", "c2"]
    for row in rows:
        body = row["response"]["body"]
        openai.types.chat.ChatCompletion.model_validate(body)
        assert row["response"]["status_code"] == 200
        assert row["error"] is None
    errors = await served.client.get(f"/v1/files/{batch.error_file_id}/content")
    (row,) = map(json.loads, errors.text.splitlines())
    assert row["custom_id"] == "c3"
    assert "max_tokens" in row["response"]["body"]["error"]["message"]
    assert batch.usage is not None
    assert batch.usage.output_tokens == 6


async def test_lists_and_deletion(served: Served) -> None:
    files = [await upload(served, make_lines(1)) for _ in range(3)]
    page = (await served.client.get("/v1/files", params={"limit": 2, "order": "asc"})).json()
    assert [one["id"] for one in page["data"]] == [files[0].id, files[1].id]
    assert page["has_more"] is True
    rest = {"after": page["last_id"], "order": "asc"}
    page = (await served.client.get("/v1/files", params=rest)).json()
    assert [one["id"] for one in page["data"]] == [files[2].id]
    assert page["has_more"] is False
    page = (await served.client.get("/v1/files", params={"purpose": "vision"})).json()
    assert page["data"] == []
    reply = await served.client.delete(f"/v1/files/{files[0].id}")
    openai.types.FileDeleted.model_validate(reply.json(), strict=True)
    for path in (f"/v1/files/{files[0].id}", f"/v1/files/{files[0].id}/content", "/v1/batches/b"):
        reply = await served.client.get(path)
        assert reply.status_code == 404
        assert "There is no" in reply.json()["error"]["message"]
    batches = [await create(served, file.id) for file in files[1:]]
    for batch in batches:
        await ended(served, batch.id)
    page = (await served.client.get("/v1/batches", params={"limit": 1})).json()
    assert page["has_more"] is True
    page = (await served.client.get("/v1/batches", params={"after": page["last_id"]})).json()
    assert len(page["data"]) == 1
    path = f"/v1/batches/{batches[0].id}"
    reply = await served.client.delete(path)
    assert reply.json() == {"id": batches[0].id, "object": "batch", "deleted": True}
    assert (await served.client.delete(path)).status_code == 404
    assert len((await served.client.get("/v1/batches")).json()["data"]) == 1
    expiring = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = await upload(served, b"x", **expiring)
    assert file.expires_at == file.created_at + 3600


async def test_cancel(served: Served) -> None:
    served.engine.hold.clear()
    batch = await create(served, (await upload(served, make_lines(5))).id)
    async with asyncio.timeout(20):
        while not served.engine.jobs:
            await asyncio.sleep(0.01)
    reply = await served.client.delete(f"/v1/files/{batch.input_file_id}")
    assert reply.status_code == 400
    assert batch.id in reply.json()["error"]["message"]
    reply = await served.client.delete(f"/v1/batches/{batch.id}")
    assert reply.status_code == 400
    assert "cancel it first" in reply.json()["error"]["message"]
    reply = await served.client.post(f"/v1/batches/{batch.id}/cancel")
    assert reply.json()["status"] == "cancelling"
    batch = await ended(served, batch.id)
    assert batch.status == "cancelled"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (5, 0)
    assert served.engine.num_running == 0


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"completion_window": "48h"}, "completion_window"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "now", "seconds": 5000}}, "anchor"),
    ],
)
async def test_wrong_batches(served: Served, change: dict[str, Any], where: str) -> None:
    file = await upload(served, make_lines(1))
    body = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h", **change}
    reply = await served.client.post("/v1/batches", json=body)
    assert reply.status_code == 400, reply.text
    assert where in reply.json()["error"]["message"]


async def test_wrong_files(served: Served) -> None:
    post = served.client.post
    replies = [
        (await post("/v1/files", json={}), "multipart/form-data"),
        (await post("/v1/files", files={"file": b"x"}), "purpose"),
        (await post("/v1/files", files={"file": b"x"}, data={"purpose": "fun"}), "purpose"),
        (await post("/v1/files", files={"other": b"x"}, data={"purpose": "batch"}), "file is"),
        (await post("/v1/files", files=[("file", b"x"), ("file", b"y")]), "several"),
        (
            await post(
                "/v1/files",
                files={"file": b"x"},
                data={"purpose": "batch", "expires_after[seconds]": "5"},
            ),
            "expires_after",
        ),
    ]
    for reply, where in replies:
        assert reply.status_code == 400, reply.text
        assert where in reply.json()["error"]["message"]
    page = (await served.client.get("/v1/files")).json()
    assert page["data"] == []
    for params in ({"limit": 0}, {"order": "up"}, {"after": "file-0"}):
        assert (await served.client.get("/v1/files", params=params)).status_code == 400
    reply = await served.client.post(
        "/v1/batches",
        json={"input_file_id": "file-0", "endpoint": CHATS, "completion_window": "24h"},
    )
    assert reply.status_code == 404
    vision = await upload(served, b"x", purpose="vision")
    body = {"input_file_id": vision.id, "endpoint": CHATS, "completion_window": "24h"}
    assert (await served.client.post("/v1/batches", json=body)).status_code == 400


async def test_without_a_folder_there_are_none(serve: Callable[..., Served]) -> None:
    served = serve()
    for path in ("/v1/files", "/v1/batches", "/v1/files/file-1/content"):
        reply = await served.client.get(path)
        assert reply.status_code == 404
        assert "--batch-dir" in reply.json()["error"]["message"]


def test_one_server_a_folder(tmp_path: Path) -> None:
    args = ServerArgs(batch=BatchArgs(folder=str(tmp_path)))
    app = build_app(ServerState(), args, CollectorRegistry())
    with pytest.raises(ConfigError, match="another server uses it"):
        build_app(ServerState(), args, CollectorRegistry())
    assert app.state.batch_endpoints >= {CHATS, "/v1/completions", "/v1/responses"}
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--batch-dir"):
        add_batches(app, BatchArgs(folder=str(tmp_path / "file")), frozenset(), ALONE)


def test_lines_come_in_their_owners_name_and_nobody_else_can_say_so() -> None:
    from starlette.datastructures import Headers

    tenants = with_batch_tenant(TenantsConfig.of(Tenant("ada")))
    assert max(tenants.tenants.values(), key=lambda t: t.priority).name == BATCH_TENANT
    inner = InnerKey()
    guard = KeyGuard(["key"], "admin", tenants=tenants, inner=inner)
    sent = Headers(inner.headers("ada"))
    assert guard.find_refusal(CHATS, sent) is None
    assert guard.find_tenant(sent) == "ada"
    assert guard.is_inner(sent)
    assert guard.find_refusal("/v1/cache/prefixes", sent) is not None
    forged = Headers(InnerKey().headers("ada"))
    assert guard.find_refusal(CHATS, forged) is not None
    assert guard.find_tenant(forged) is None
    assert not guard.is_inner(forged)
    keyed = TenantsConfig(tenants.tenants, {digest_key("k"): "ada"})
    guard = KeyGuard([], tenants=keyed)
    assert guard.find_tenant(sent) is None
