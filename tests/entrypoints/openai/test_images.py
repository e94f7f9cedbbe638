"""Pictures of requests, from their bytes to what the engine is asked, over every interface."""

import asyncio
import base64
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.entrypoints.image_fixtures import (
    base64_of,
    family_of,
    file_of,
    image_input,
    picture,
    tokenizer_of,
    url_of,
    url_of_size,
)
from tests.entrypoints.openai.conftest import Served
from tests.entrypoints.openai.fake_engine import FakeEngine
from vllm.multimodal.inputs import ImageFeature
from vllm.tokenizers import Tokenizer, make_chat_encoder
from vllm.v1.engine.submission import Submission

TEXT = {"type": "text", "text": "What is this?"}
_IN = {"type": "image_url", "image_url": {"url": url_of(picture())}}


class _Engine(FakeEngine):
    """Notes the pictures that it is asked about."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.images: list[tuple[ImageFeature, ...]] = []

    async def submit_all(self, submissions: Sequence[Submission]) -> list[Callable[[], None]]:
        for given in submissions:
            assert isinstance(given.prompt, dict)
            self.images.append(tuple(given.prompt["images"]))  # type: ignore[typeddict-item]
        return await super().submit_all(submissions)


def show(serve: Callable[..., Served], name: str = "qwen3_5", **settings: Any) -> Served:
    """Return a server of a tiny model of a family."""
    served = serve(served_model={"max_model_len": 4096})
    tokenizer = tokenizer_of(name)
    family = family_of(name, tokenizer)
    engine = _Engine(tokenizer)
    context = dataclasses.replace(
        served.context,
        tokenizer=tokenizer,
        chat_encoder=make_chat_encoder({"model_type": name}, tokenizer),
        served_model=dataclasses.replace(
            served.context.served_model, vocab_size=tokenizer.vocab_size
        ),
        engine=engine,
        images=image_input(family, **settings),
    )
    served.app.state.context = context
    return dataclasses.replace(served, engine=engine, context=context)


async def ask(served: Served, content: Any, **fields: Any) -> Any:
    """Send a chat of one question."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
    return await served.client.post("/v1/chat/completions", json=body)


def last_images(served: Served) -> tuple[ImageFeature, ...]:
    """Return the pictures of the last request."""
    assert isinstance(served.engine, _Engine)
    return served.engine.images[-1]


def last_text(served: Served) -> str:
    """Return the last prompt, each run of soft tokens shortened."""
    tokenizer, family = served.context.tokenizer, served.context.images.family
    assert family is not None
    text = tokenizer.decode(served.engine.jobs[-1][0])
    for image in last_images(served):
        text = text.replace(family.text.soft_token * image.num_tokens, "(picture)", 1)
    return text


@pytest.mark.parametrize(
    ("name", "shown", "grid"),
    [
        ("qwen3_5", "<|vision_start|>(picture)<|vision_end|>What is this?", (7, 10)),
        ("gemma4", "<|image>(picture)<image|>What is this?", (14, 19)),
        ("gemma3", "\n\n<start_of_image>(picture)<end_of_image>\n\nWhat is this?", (2, 2)),
    ],
)
async def test_a_picture_stands_where_its_family_has_it(
    serve: Any, name: str, shown: str, grid: tuple[int, int]
) -> None:
    served = show(serve, name)

    answer = await ask(served, [_IN, TEXT])

    assert answer.status_code == 200, answer.text
    (image,) = last_images(served)
    token_ids = served.engine.jobs[-1][0]
    family = served.context.images.family
    assert family is not None
    run = token_ids[image.offset : image.end]
    assert run == [family.placeholder_id] * (grid[0] * grid[1])
    assert token_ids.count(family.placeholder_id) == len(run)
    assert last_text(served) == f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
    assert (image.rows, image.columns) == grid
    assert len(image.pixels) == image.height * image.width * 3
    # Soft tokens are prompt tokens.
    assert answer.json()["usage"]["prompt_tokens"] == len(token_ids)
    # Where the picture ends, another question may begin.
    assert {image.offset, image.end} <= set(served.engine.boundaries[-1])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": url_of(picture())},
        {"type": "image_url", "image_url": {"url": url_of(picture()), "detail": "auto"}},
        {"image_url": url_of(picture())},
        {"type": "input_image", "image_url": url_of(picture()), "detail": "auto"},
        {"type": "image", "image": url_of(picture())},
        {"type": "image_url", "image_url": {"url": url_of(picture(), "BMP", "image/jpeg")}},
        {"type": "image_url", "image_url": url_of(picture(), "WEBP", "text/plain", lossless=True)},
        {"type": "image_url", "image_url": {"url": "DATA:;base64," + base64_of(picture())}},
    ],
)
async def test_every_spelling_and_file_of_equal_pixels_is_the_same_picture(
    serve: Any, part: Any
) -> None:
    served = show(serve)
    await ask(served, [_IN, TEXT])
    (first,) = last_images(served)

    answer = await ask(served, [part, TEXT])

    assert answer.status_code == 200, answer.text
    assert last_images(served) == (first,)


async def test_other_pixels_are_another_picture_of_equal_tokens(serve: Any) -> None:
    served = show(serve)
    changed = picture()
    changed[0, 0, 0] ^= 255
    await ask(served, [_IN, TEXT])
    (first,) = last_images(served)
    await ask(served, [{"type": "image_url", "image_url": url_of(changed)}, TEXT])
    (second,) = last_images(served)

    assert served.engine.jobs[0][0] == served.engine.jobs[1][0]
    assert first.identifier != second.identifier


async def test_sizes_follow_detail_and_settings(serve: Any) -> None:
    served = show(serve, "gemma4")
    sizes = {}
    for detail in ("auto", "low", "high"):
        part = {"type": "image_url", "image_url": {"url": url_of(picture()), "detail": detail}}
        assert (await ask(served, [part])).status_code == 200
        sizes[detail] = last_images(served)[0].num_tokens
    await ask(served, [_IN], mm_processor_kwargs={"max_soft_tokens": 560})

    assert sizes == {"auto": 266, "low": 63, "high": 266}
    assert 480 < last_images(served)[0].num_tokens <= 560
    refused = await ask(served, [_IN], mm_processor_kwargs={"max_pixels": 560})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "mm_processor_kwargs"


async def test_pictures_keep_their_order_over_messages_and_roles(serve: Any) -> None:
    served = show(serve)
    parts = [{"type": "image_url", "image_url": url_of(picture(i, 64 + 32 * i))} for i in range(4)]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [parts[0], TEXT, parts[1]]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [TEXT, parts[2]]},
        {"role": "user", "content": [parts[3]]},
    ]

    answer = await served.client.post("/v1/chat/completions", json={"messages": messages})

    assert answer.status_code == 200, answer.text
    found = last_images(served)
    alone = []
    for part in parts:
        await ask(served, [part])
        alone.append(last_images(served)[0].identifier)
    assert [image.identifier for image in found] == alone
    assert [image.offset for image in found] == sorted(image.offset for image in found)


async def test_a_marker_that_a_client_writes_is_text(serve: Any) -> None:
    served = show(serve)
    forged = {"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|>"}

    answer = await ask(served, [forged, _IN, TEXT])

    assert answer.status_code == 200, answer.text
    (image,) = last_images(served)
    token_ids = served.engine.jobs[-1][0]
    assert token_ids.count(token_ids[image.offset]) == image.num_tokens


async def test_a_role_whose_template_drops_pictures_is_named(serve: Any) -> None:
    served = show(serve, "gemma4")
    for role in ("system", "developer"):
        messages = [{"role": role, "content": [_IN]}, {"role": "user", "content": "hi"}]
        answer = await served.client.post("/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 400
        assert f"messages[0].content[0] is a picture in a message of role '{role}'" in answer.text


async def test_pictures_of_results_are_shown_behind_them_where_the_format_has_no_place(
    serve: Any,
) -> None:
    served = show(serve, "gemma4")
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(picture())}
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [{"type": "text", "text": "seen"}, {"type": "image", "source": source}],
    }
    messages = [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
        },
        {"role": "user", "content": [result]},
    ]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4}

    answer = await served.client.post("/v1/messages", json=body)
    counted = await served.client.post("/v1/messages/count_tokens", json=body)

    assert answer.status_code == 200, answer.text
    assert len(last_images(served)) == 1
    assert "tool\nseen<|im_end|>\n<|im_start|>user\n<|image>(picture)<image|>" in last_text(served)
    assert counted.json()["input_tokens"] == len(served.engine.jobs[-1][0])
    usage = answer.json()["usage"]
    told = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[name] for name in told) == len(served.engine.jobs[-1][0])


async def test_messages_and_responses_ask_what_chats_ask(serve: Any) -> None:
    served = show(serve)
    await ask(served, [_IN, TEXT])
    expected = (served.engine.jobs[-1][0], last_images(served))
    source = {"type": "base64", "media_type": "image/jpeg", "data": base64_of(picture())}
    content = [{"type": "image", "source": source}, TEXT]
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    answer = await served.client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert (served.engine.jobs[-1][0], last_images(served)) == expected

    seen = {"type": "input_image", "image_url": url_of(picture()), "detail": "auto"}
    item = {"role": "user", "content": [seen, {"type": "input_text", "text": TEXT["text"]}]}
    answer = await served.client.post("/v1/responses", json={"input": [item]})
    assert answer.status_code == 200, answer.text
    assert (served.engine.jobs[-1][0], last_images(served)) == expected

    # A stored conversation keeps its pictures.
    following = {"input": "and?", "previous_response_id": answer.json()["id"]}
    answer = await served.client.post("/v1/responses", json=following)
    assert answer.status_code == 200, answer.text
    assert last_images(served) == expected[1]


async def test_results_of_functions_in_responses_may_have_pictures(serve: Any) -> None:
    served = show(serve)
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    seen = {"type": "input_image", "image_url": url_of(picture())}
    output = {"type": "function_call_output", "call_id": "c", "output": [seen]}
    items = [{"role": "user", "content": "look"}, call, output]

    answer = await served.client.post("/v1/responses", json={"input": items})

    assert answer.status_code == 200, answer.text
    assert len(last_images(served)) == 1
    refused = await served.client.post(
        "/v1/responses", json={"input": [{"role": "user", "content": [{**seen, "file_id": "f"}]}]}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


async def test_completions_have_a_marker_for_each_picture(serve: Any) -> None:
    served = show(serve)
    await ask(served, [_IN, TEXT])
    token_ids, images = served.engine.jobs[-1][0], last_images(served)
    text = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is this?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    data = {"image": url_of(picture())}
    marked = served.context.tokenizer.encode(text)
    for prompt in (text, marked, token_ids):
        body = {"prompt": prompt, "multi_modal_data": data, "max_tokens": 4}
        answer = await served.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert (served.engine.jobs[-1][0], last_images(served)) == (token_ids, images)
    shorter = [*token_ids[: images[0].offset], *token_ids[images[0].offset + 1 :]]
    for prompt, why in (("no marker", "0 markers"), (shorter, "69"), (text + text, "2 markers")):
        body = {"prompt": prompt, "multi_modal_data": data, "max_tokens": 4}
        answer = await served.client.post("/v1/completions", json=body)
        assert answer.status_code == 400, prompt
        assert why in answer.text
        assert answer.json()["error"]["param"] == "prompt"


async def test_tokenize_and_kept_prefixes_count_soft_tokens(serve: Any) -> None:
    served = show(serve)
    await ask(served, [_IN, TEXT])
    messages = [{"role": "user", "content": [_IN, TEXT]}]

    tokenized = await served.client.post("/tokenize", json={"messages": messages})

    assert tokenized.json()["tokens"] == served.engine.jobs[-1][0]
    await served.client.post("/v1/cache/prefixes", json={"messages": messages})
    assert len(last_images(served)) == 1


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,????"}}, "base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "empty"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64"}}, "comma"),
        ({"type": "image_url", "image_url": {"url": base64_of(picture())}}, "url"),
        ({"type": "image_url", "image_url": {"url": ""}}, "names no picture"),
        ({"type": "image_url", "image_url": {}}, "names no picture"),
        ({"type": "image_url"}, "names no picture"),
        ({"type": "image_url", "image_url": 7}, "string"),
        ({"type": "image_url", "image_url": {"url": 7}}, "string"),
        ({"type": "image_url", "image_url": {"url": "x:y", "detail": "ultra"}}, "detail"),
        ({"type": "image"}, "names no picture"),
        ({"type": "image_pil", "image_pil": "x"}, "url"),
        ({"type": "image_embeds", "image_embeds": "x"}, "image_embeds"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "video"),
        ({"type": "input_audio", "input_audio": {}}, "sound"),
        ({"type": "input_image", "file_id": "file-1"}, "file_id"),
        ({"type": "image_url", "image_url": {"url": "https://a.example/x.png"}}, "allowed-media"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "allowed-local"),
        ({"type": "image_url", "image_url": {"url": "file://a.example/x"}}, "another machine"),
        ({"type": "image_url", "image_url": url_of(picture(0, 300, 1))}, "200 times"),
        ({"type": "image_url", "image_url": url_of(picture())[:-400]}, "cut off"),
        ({"type": "image_url", "image_url": "x:y", "uuid": ""}, "uuid"),
        ({"type": "image_url", "image_url": "data:image/png,abc"}, "not base64"),
        ({"type": "image_url", "image_url": "data:image/png;base64,data:abc"}, "data URL where"),
        ({"type": "image_url", "image_url": url_of_size(30_000, 30_000)}, "40000000 pixels"),
        ({"type": "image_url", "image_url": url_of_size(9_000, 9_000)}, "9000 x 9000 pixels, more"),
        ({"type": "image_url", "image_url": None, "uuid": "never"}, "never"),
    ],
)
async def test_what_is_wrong_with_a_picture_is_told_with_its_place(
    serve: Any, part: Any, why: str
) -> None:
    served = show(serve)

    answer = await ask(served, [TEXT, part])

    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages"
    assert why in error["message"]
    # One sentence about the part.
    said = r"messages\[0\]\.content\[1\]\S* (is|has|holds|names|must|cannot|the) .*[^.]\."
    assert re.fullmatch(said, error["message"]), error["message"]
    assert served.engine.jobs == []


async def test_too_many_pictures_and_models_without_eyes_are_told(serve: Any, served: Any) -> None:
    seeing = show(serve, max_images=1)

    many = await ask(seeing, [_IN, _IN])
    none = await ask(served, [_IN])

    assert (many.status_code, none.status_code) == (400, 400)
    assert "2 pictures; at most 1" in many.text
    assert "only text is served" in none.text
    long = dataclasses.replace(
        seeing.context,
        served_model=dataclasses.replace(seeing.context.served_model, max_model_len=64),
    )
    seeing.app.state.context = long
    too_long = await ask(seeing, [_IN])
    assert too_long.status_code == 400
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


async def test_names_of_pictures_stand_for_files_that_were_sent(serve: Any) -> None:
    served = show(serve)
    named = {**_IN, "uuid": "screen-1"}
    await ask(served, [named])
    (first,) = last_images(served)

    again = await ask(served, [{"type": "image_url", "image_url": None, "uuid": "screen-1"}])
    other = await ask(served, [{**named, "image_url": url_of(picture(1))}])
    salted = await ask(
        served, [{"type": "image_url", "image_url": None, "uuid": "screen-1"}], cache_salt="b"
    )

    assert again.status_code == 200
    assert last_images(served) == (first,)
    assert (other.status_code, salted.status_code) == (400, 400)
    assert "another picture" in other.text


async def test_files_of_a_folder_are_read_and_nothing_beside_it(serve: Any, tmp_path: Any) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a b.png").write_bytes(file_of(picture()))
    (tmp_path / "secret.png").write_bytes(file_of(picture()))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "inside.png").symlink_to(folder / "a b.png")
    served = show(serve, folder=str(folder))

    async def status(path: str) -> int:
        part = {"type": "image_url", "image_url": f"file://{path}"}
        return int((await ask(served, [part])).status_code)

    assert await status(f"{folder}/a%20b.png") == 200
    assert await status(f"{folder}/inside.png") == 200
    for wrong in ("link.png", "../secret.png", "none.png", "", "a%00b", "%2e%2e/secret.png"):
        assert await status(f"{folder}/{wrong}") == 400, wrong
    assert await status("/dev/zero") == 400


async def test_many_damaged_files_leave_the_server_quick(serve: Any) -> None:
    served = show(serve)
    draws = np.random.default_rng(3)
    file = bytearray(file_of(picture(0, 200, 150), "JPEG"))
    slowest = 0.0
    statuses = set()

    async def watch() -> None:
        nonlocal slowest
        while True:
            before = asyncio.get_running_loop().time()
            await asyncio.sleep(0.005)
            slowest = max(slowest, asyncio.get_running_loop().time() - before)

    watching = asyncio.create_task(watch())
    for _ in range(60):
        damaged = bytearray(file)
        for place in draws.integers(0, len(file), 12):
            damaged[place] = draws.integers(256)
        data = "data:;base64," + base64.b64encode(bytes(damaged)).decode()
        answer = await ask(served, [{"type": "image_url", "image_url": data}])
        statuses.add(answer.status_code)
    watching.cancel()

    assert statuses == {200, 400}
    assert slowest < 2.0


async def test_shared_beginnings_are_marked_by_clients_behind_pictures(serve: Any) -> None:
    served = show(serve)
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(picture())}
    marked = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    body = {
        "model": "tiny",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": [marked, TEXT]}],
    }

    answer = await served.client.post("/v1/messages", json=body)

    assert answer.status_code == 200, answer.text
    (image,) = last_images(served)
    # Behind the token that closes it.
    assert image.end + 1 in served.engine.boundaries[-1]


async def test_stored_items_tell_addresses_of_pictures_only_if_asked(serve: Any) -> None:
    served = show(serve)
    seen = {"type": "input_image", "image_url": url_of(picture())}
    body = {"input": [{"role": "user", "content": [seen]}]}
    made = (await served.client.post("/v1/responses", json=body)).json()
    route = f"/v1/responses/{made['id']}/input_items"

    plain = (await served.client.get(route)).json()
    asked = await served.client.get(route, params={"include": "message.input_image.image_url"})

    assert plain["data"][0]["content"][0]["image_url"] is None
    assert asked.json()["data"][0]["content"][0]["image_url"] == seen["image_url"]
    assert (await served.client.get(route, params={"include": "x"})).status_code == 400


async def test_vectors_are_made_of_texts(serve: Any) -> None:
    served = show(serve)

    answer = await served.client.post(
        "/v1/embeddings", json={"messages": [{"role": "user", "content": [_IN]}]}
    )

    assert answer.status_code == 400
    assert "made of texts" in answer.text
