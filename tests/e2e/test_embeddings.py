"""Vectors and scores beside generation, on one server, as clients see them."""

import base64
import json
import math
import random
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server_process import NO_TLS, ServerProcess

UNIT = 32
SIZE = 128
TEXTS = ["The river is high today.", "Ein Zug fährt nach Bergen.", "短い文です。", "x"]
RERANK = {
    "query": "Which train goes to Bergen?",
    "documents": ["The train to Bergen leaves at nine.", "A cat sleeps.", "Bread is baked here."],
}


class Asker:
    """Posts bodies to a server."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def __call__(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        answer = self._http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def embed(self, given: Any, **fields: Any) -> list[list[float]]:
        answer = self("/v1/embeddings", {"input": given, **fields})
        return [item["embedding"] for item in answer["data"]]

    def get(self, path: str) -> Any:
        return self._http.get(path).json()


@pytest.fixture
def ask(cpu_server: ServerProcess) -> Iterator[Asker]:
    with httpx.Client(base_url=cpu_server.url, timeout=120.0, verify=NO_TLS) as http:
        yield Asker(http)
    cpu_server.wait_idle()


def ids_of(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, 900) for _ in range(count)]


def decode(text: str) -> list[float]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def norm(vector: list[float]) -> float:
    return math.sqrt(sum(value * value for value in vector))


def test_a_vector_has_length_one_and_its_cost(ask: Asker) -> None:
    answer = ask("/v1/embeddings", {"input": TEXTS[0], "model": "deepseek-v4"})
    (item,) = answer["data"]
    assert (answer["object"], item["object"], item["index"]) == ("list", "embedding", 0)
    assert len(item["embedding"]) == SIZE
    assert norm(item["embedding"]) == pytest.approx(1.0, abs=1e-6)
    count = ask("/tokenize", {"prompt": TEXTS[0]})["count"]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == count
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_bits_do_not_depend_on_company_nor_on_the_cache(ask: Asker) -> None:
    alone = [ask.embed(text)[0] for text in TEXTS]
    assert ask.embed(TEXTS) == alone
    assert ask.embed(TEXTS[::-1]) == alone[::-1]
    token_ids = ask("/tokenize", {"prompt": TEXTS[1]})["tokens"]
    assert ask.embed(token_ids) == ask.embed([token_ids]) == [alone[1]]
    long = ids_of(1, 500)
    first = ask("/v1/embeddings", {"input": long, "cache_salt": "a"})
    again = ask("/v1/embeddings", {"input": long, "cache_salt": "a"})
    assert again["data"] == first["data"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 480
    other = ask("/v1/embeddings", {"input": long, "cache_salt": "b"})
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert other["data"] == first["data"]


def test_bits_do_not_depend_on_chunks(ask: Asker) -> None:
    """Beside long generations a prompt is computed in other pieces than alone."""
    long = ids_of(2, 3000)
    (alone,) = ask.embed(long, cache_salt="alone")
    busy = {"prompt": ids_of(3, 2000), "max_tokens": 40, "ignore_eos": True, "cache_salt": "busy"}
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, "/v1/completions", busy) for _ in range(3)]
        (beside,) = ask.embed(long, cache_salt="beside")
        assert all(len(a.result()["choices"]) == 1 for a in answers)
    assert beside == alone


def test_numbers_in_base64(ask: Asker) -> None:
    (floats,) = ask.embed(TEXTS[0])
    (text,) = ask.embed(TEXTS[0], encoding_format="base64")
    assert decode(text) == floats
    (big,) = ask.embed(TEXTS[0], encoding_format="base64", endianness="big")
    assert list(struct.unpack(f">{SIZE}f", base64.b64decode(big))) == floats
    (half,) = ask.embed(TEXTS[0], encoding_format="base64", embed_dtype="float16")
    assert struct.unpack(f"<{SIZE}e", base64.b64decode(half)) == pytest.approx(floats, abs=1e-3)


def test_fewer_dimensions(ask: Asker) -> None:
    (whole,) = ask.embed(TEXTS[0])
    (half,) = ask.embed(TEXTS[0], dimensions=SIZE // 2)
    length = norm(whole[: SIZE // 2])
    assert half == pytest.approx([value / length for value in whole[: SIZE // 2]], abs=1e-6)
    (raw,) = ask.embed(TEXTS[0], use_activation=False)
    assert norm(raw) != pytest.approx(1.0, abs=1e-3)
    assert whole == pytest.approx([value / norm(raw) for value in raw], abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dimensions": 0}, "dimensions=0"),
        ({"dimensions": -1}, "dimensions=-1"),
        ({"dimensions": SIZE + 1}, f"1 to {SIZE}"),
        ({"dimensions": "8"}, "dimensions"),
        ({"encoding_format": "int7"}, "encoding_format"),
        ({"normalize": False}, "use_activation"),
        ({"input": ""}, "empty"),
        ({"input": []}, "empty"),
        ({"input": [""]}, "empty"),
        ({"input": [[]]}, "empty"),
        ({"input": ["a", ""]}, "number 1"),
        ({"input": [10**7]}, "vocabulary|token ids"),
        ({"input": [-1]}, "token ids"),
        ({"input": [True]}, "neither"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a"] * 2049}, "2048"),
        ({"input": ids_of(4, 16_500)}, "16384"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 16_385}, "16384"),
        ({"truncation_side": "up"}, "truncation_side"),
        ({"prompt_name": "query"}, "prompt_name"),
        ({"priority": 3}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_what_is_wrong_is_named(ask: Asker, fields: dict[str, Any], named: str) -> None:
    error = ask("/v1/embeddings", {"input": "a", **fields}, 400)["error"]
    assert any(word in error["message"] for word in named.split("|"))
    assert error["type"] == "BadRequestError"


def test_an_unknown_model_is_not_found(ask: Asker) -> None:
    ask("/v1/embeddings", {"input": "a", "model": "nobody"}, 404)


def test_the_longest_text_fills_the_context(ask: Asker) -> None:
    assert len(ask.embed(ids_of(5, 16_384), skip_cache_insert=True)) == 1
    error = ask("/v1/embeddings", {"input": ids_of(5, 16_385)}, 400)["error"]
    assert error["code"] == "context_length_exceeded"


def test_long_texts_are_cut_where_asked(ask: Asker) -> None:
    long = ids_of(6, 16_500)
    cut = {"truncate_prompt_tokens": 64}
    assert ask.embed(long, truncation_side="right", **cut) == ask.embed(long[:64])
    assert ask.embed(long, truncation_side="left", **cut) == ask.embed(long[-64:])
    text = "one two three four five six seven eight nine ten " * 4
    tokens = ask("/tokenize", {"prompt": text})["tokens"]
    assert ask.embed(text, truncate_prompt_tokens=9) == ask.embed(tokens[:9])


def test_generation_hits_what_was_embedded_and_the_reverse(ask: Asker) -> None:
    def complete(ids: list[int]) -> int:
        body = {"prompt": ids, "max_tokens": 2, "temperature": 0}
        usage = ask("/v1/completions", body)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    ids = ids_of(7, 400)
    (vector,) = ask.embed(ids)
    assert complete([*ids, *ids_of(8, 20)]) >= 352
    other = ids_of(9, 400)
    complete(other)
    answer = ask("/v1/embeddings", {"input": other})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 352
    assert ask.embed(ids) == [vector]


def test_texts_of_a_request_share_their_beginning(ask: Asker) -> None:
    shared = ids_of(10, 450)
    body = {"input": [[*shared, *ids_of(20 + i, 30)] for i in range(6)]}
    usage = ask("/v1/embeddings", body)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 5 * (450 // 128 * 128)


def test_cohere_types_agree(ask: Asker) -> None:
    types = ["float", "base64", "binary", "ubinary", "int8", "uint8"]
    body = {"texts": TEXTS, "input_type": "search_document", "embedding_types": types}
    answer = ask("/v2/embed", {**body, "model": "deepseek-v4"})
    made = answer["embeddings"]
    assert answer["response_type"] == "embeddings_by_type"
    assert answer["texts"] == TEXTS
    assert made["float"] == ask.embed(TEXTS)
    for floats, text, signed, unsigned, steps, raised in zip(
        *(made[kind] for kind in types), strict=True
    ):
        assert decode(text) == floats
        bits = [int(value >= 0) for value in floats]
        packed = [
            sum(bit << (7 - i) for i, bit in enumerate(bits[at : at + 8]))
            for at in range(0, SIZE, 8)
        ]
        assert unsigned == packed
        assert signed == [byte - 128 for byte in packed]
        largest = max(map(abs, floats))
        assert steps == pytest.approx([127 * value / largest for value in floats], abs=0.5001)
        assert raised == [step + 128 for step in steps]
    tokens = answer["meta"]["billed_units"]["input_tokens"]
    assert tokens == ask("/v1/embeddings", {"input": TEXTS})["usage"]["prompt_tokens"]
    for fields in (
        {"embedding_types": ["int4"]},
        {"embedding_types": ["binary"], "output_dimension": 12},
        {"input_type": "image"},
        {"texts": None},
        {"truncate": "NONE", "texts": ["word " * 20_000]},
    ):
        error = ask("/v2/embed", {**body, **fields}, 400)
        assert error["message"]
    ask("/v2/embed", {**body, "max_tokens": 2, "truncate": "START"})


def test_documents_come_sorted_on_three_paths(ask: Asker) -> None:
    answers = [ask(path, RERANK) for path in ("/rerank", "/v1/rerank", "/v2/rerank")]
    results = answers[0]["results"]
    assert all(answer["results"] == results for answer in answers)
    scores = [item["relevance_score"] for item in results]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert sorted(item["index"] for item in results) == [0, 1, 2]
    for item in results:
        assert item["document"] == {"text": RERANK["documents"][item["index"]]}
    best = ask("/rerank", {**RERANK, "top_n": 1, "return_documents": False})["results"]
    assert [item["index"] for item in best] == [results[0]["index"]]
    assert "document" not in best[0]
    objects = [{"text": text, "id": i} for i, text in enumerate(RERANK["documents"])]
    told = ask("/rerank", {**RERANK, "documents": objects, "top_n": 0})["results"]
    assert [item["relevance_score"] for item in told] == scores
    assert told[0]["document"]["id"] == told[0]["index"]


def test_a_score_does_not_depend_on_neighbours(ask: Asker) -> None:
    together = ask("/rerank", RERANK)["results"]
    for item in together:
        alone = ask("/rerank", {**RERANK, "documents": [RERANK["documents"][item["index"]]]})
        assert alone["results"][0]["relevance_score"] == item["relevance_score"]
    scored = ask("/score", {"text_1": RERANK["query"], "text_2": RERANK["documents"]})["data"]
    by_index = {item["index"]: item["relevance_score"] for item in together}
    assert {item["index"]: item["score"] for item in scored} == by_index


def test_a_query_is_computed_once(ask: Asker) -> None:
    query = " ".join(str(value) for value in ids_of(30, 120))
    documents = [f"Document {i} tells of {i * 7}." for i in range(8)]
    usage = ask("/rerank", {"query": query, "documents": documents})["usage"]
    num_tokens = ask("/tokenize", {"prompt": query, "add_special_tokens": False})["count"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 7 * (num_tokens // 128 * 128)


@pytest.mark.parametrize(
    "fields",
    [
        {"documents": []},
        {"documents": [""]},
        {"documents": [5]},
        {"documents": "text"},
        {"documents": None},
        {"query": ""},
        {"query": None},
        {"top_n": -1},
        {"max_tokens_per_doc": 0},
        {"instruction": "a", "instruct": "b"},
    ],
)
def test_wrong_reranks_are_refused(ask: Asker, fields: dict[str, Any]) -> None:
    named = next(iter(fields))
    assert named in ask("/v1/rerank", {**RERANK, **fields}, 400)["error"]["message"]
    assert named in ask("/v2/rerank", {**RERANK, **fields}, 400)["message"]


def test_long_documents_are_cut(ask: Asker) -> None:
    long = {"query": "a", "documents": ["word " * 30_000]}
    ask("/rerank", long, 400)
    ask("/rerank", {**long, "max_tokens_per_doc": 50})
    cut = ask("/rerank", {**long, "truncate_prompt_tokens": 100})
    assert cut["usage"]["prompt_tokens"] <= 100


def test_scores_of_pairs(ask: Asker) -> None:
    ones, others = ["a b", "c d"], ["e f", "g h"]
    want = [item["score"] for item in ask("/score", {"text_1": ones, "text_2": others})["data"]]
    for names in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        answer = ask("/v1/score", dict(zip(names, (ones, others), strict=True)))
        assert [item["score"] for item in answer["data"]] == want
        assert answer["data"][0]["object"] == "score"
    one_with_many = ask("/score", {"text_1": ones[0], "text_2": others})["data"]
    assert one_with_many[0]["score"] == want[0]
    assert len(one_with_many) == 2
    ask("/score", {"text_1": ones, "text_2": ["x"]}, 400)
    ask("/score", {"text_1": ones, "text_2": ["x", "y", "z"]}, 400)
    ask("/score", {"text_1": ones}, 400)


def test_a_vector_for_each_token(ask: Asker) -> None:
    ids = ids_of(40, 70)
    body = {"input": ids, "task": "token_embed"}
    (item,) = ask("/pooling", body)["data"]
    assert item["object"] == "pooling"
    assert len(item["data"]) == 70
    assert item["data"][-1] == ask.embed(ids)[0]
    assert item["data"][32] == ask.embed(ids[:33])[0]
    # What is cached is of no use to it, and it is right all the same.
    assert ask("/pooling", body)["data"] == [item]
    (packed,) = ask("/pooling", {**body, "encoding_format": "base64"})["data"]
    assert decode(packed["data"]) == [value for row in item["data"] for value in row]
    (whole,) = ask("/pooling", {"input": ids, "task": "embed"})["data"]
    assert whole["data"] == item["data"][-1]
    assert "classify" in ask("/pooling", {**body, "task": "classify"}, 400)["error"]["message"]
    assert ask("/classify", {"input": "a"}, 404)["error"]["message"].startswith("Classification")


def test_chats_are_embedded_as_they_are_rendered(ask: Asker) -> None:
    chat = [{"role": "user", "content": "Where is Bergen?"}]
    tokens = ask("/tokenize", {"messages": chat, "add_generation_prompt": False})["tokens"]
    answer = ask("/v1/embeddings", {"messages": chat})
    assert [item["embedding"] for item in answer["data"]] == ask.embed(tokens)
    two = ask("/v1/embeddings", {"messages": [chat, chat]})
    assert len(two["data"]) == 2
    ask("/v1/embeddings", {"messages": chat, "input": "a"}, 400)


def test_models_say_what_they_can(ask: Asker) -> None:
    (card,) = ask.get("/v1/models")["data"]
    assert {"generation", "embeddings", "rerank", "score"} <= set(card["capabilities"])
    assert "trained to generate" in card["note"]


def test_the_openai_client_reads_it(cpu_server: ServerProcess, ask: Asker) -> None:
    """It asks for base64 by itself."""
    http = openai.DefaultHttpxClient(verify=NO_TLS)
    with openai.OpenAI(base_url=cpu_server.url + "/v1", api_key="k", http_client=http) as client:
        answer = client.embeddings.create(model="deepseek-v4", input=TEXTS)
    assert [item.embedding for item in answer.data] == ask.embed(TEXTS)
    assert answer.usage.prompt_tokens > 0


def test_metrics_count_them(cpu_server: ServerProcess, ask: Asker) -> None:
    def read(name: str) -> float:
        cpu_server.wait_idle()
        lines = cpu_server.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [read(name) for name in names]
    ask.embed(ids_of(50, 33))
    assert [read(name) - old for name, old in zip(names, before, strict=True)] == [33.0, 0.0]


def test_bodies_are_documented(ask: Asker) -> None:
    paths = ask.get("/openapi.json")["paths"]
    for path in ("/v1/embeddings", "/v2/embed", "/rerank", "/v1/rerank", "/score", "/pooling"):
        assert "post" in paths[path]
    assert json.dumps(paths["/v1/embeddings"])
