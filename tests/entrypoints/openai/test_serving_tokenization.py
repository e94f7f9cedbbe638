"""``/tokenize`` and ``/detokenize``."""

from typing import Any

import pytest

from tests.entrypoints.openai.conftest import Served


async def test_round_trip(served: Served) -> None:
    text = "Grüße, 世界"
    body = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    answer = (await served.client.post("/tokenize", json=body)).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 64
    back = await served.client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


async def test_special_tokens_are_the_default(served: Served) -> None:
    with_bos = (await served.client.post("/tokenize", json={"prompt": "a"})).json()["tokens"]
    assert with_bos[0] == served.context.tokenizer.bos_token_id
    body = {"prompt": "a", "add_special_tokens": False}
    assert (await served.client.post("/tokenize", json=body)).json()["tokens"] == with_bos[1:]


async def test_a_chat_is_what_the_model_sees(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = (await served.client.post("/tokenize", json=body)).json()["tokens"]
    await served.client.post("/v1/chat/completions", json=body)
    assert served.engine.jobs[0][0] == tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_refused(served: Served, path: str, body: Any, param: str) -> None:
    response = await served.client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_the_tokenizers_settings_by_flag(serve: Any) -> None:
    assert (await serve().client.get("/tokenizer_info")).status_code == 404
    served = serve(enable_tokenizer_info_endpoint=True)
    told = (await served.client.get("/tokenizer_info")).json()
    tokenizer = served.context.tokenizer
    assert (told["bos_token"], told["eos_token"]) == (tokenizer.bos_token, tokenizer.eos_token)
    assert told["tokenizer_class"]
    assert told["vocab_size"] == tokenizer.vocab_size
