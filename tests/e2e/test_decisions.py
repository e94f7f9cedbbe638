"""``/v1/decisions`` by raw HTTP, on one server with the embedded model."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai.types
import pytest

from tests.e2e.server_process import NO_TLS, ServerProcess, sum_series

UNIT = 32
PREDICATE = {"type": "predicate", "instructions": "Is the lamp red?"}
CHOICE = {
    "type": "choice",
    "name": "which",
    "instructions": "Which lamp?",
    "choices": [{"value": True}, {"value": "true", "description": "the text"}, {"value": "desk"}],
}
SCORE = {
    "type": "score",
    "instructions": [{"type": "input_text", "text": "How bright?"}],
    "levels": [{"label": "dark"}, {"label": "dim", "description": "a bit"}, {"label": "bright"}],
}
DOCUMENT = " ".join(f"The lamp {i} is {('red', 'green', 'blue')[i % 3]}." for i in range(125))
ASKED = [{"type": "predicate", "instructions": f"Is lamp {i} red?"} for i in range(8)]


class Asker:
    """Posts decisions to a server."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._http.post(path, json=body)

    def __call__(self, questions: Any, given: Any = "A red lamp.", **fields: Any) -> dict[str, Any]:
        reply = self.post("/v1/decisions", {"input": given, "questions": questions, **fields})
        assert reply.status_code == 200, reply.text
        told: dict[str, Any] = reply.json()
        # As strictly as the client's own types read it.
        openai.types.Decision.model_validate(told, strict=True)
        return told

    def refused(self, questions: Any, given: Any = "A red lamp.", **fields: Any) -> str:
        reply = self.post("/v1/decisions", {"input": given, "questions": questions, **fields})
        assert reply.status_code == 400, reply.text
        return str(reply.json()["error"]["message"])

    def cached(self, questions: Any, **fields: Any) -> int:
        usage = self(questions, DOCUMENT, **fields)["usage"]
        return int(usage["input_tokens_details"]["cached_tokens"])


@pytest.fixture
def ask(cpu_server: ServerProcess) -> Iterator[Asker]:
    with httpx.Client(base_url=cpu_server.url, timeout=120.0, verify=NO_TLS) as http:
        yield Asker(http)
    cpu_server.wait_idle()


def choices(count: int) -> dict[str, Any]:
    return {**CHOICE, "choices": [{"value": f"v{i}"} for i in range(count)]}


def levels(count: int) -> dict[str, Any]:
    return {**SCORE, "levels": [{"label": f"l{i}"} for i in range(count)]}


def test_a_predicate(ask: Asker) -> None:
    (answer,) = ask([PREDICATE])["answers"]
    assert answer.keys() == {"type", "name", "probability"}
    assert 0 < answer["probability"] < 1


def test_a_choice_knows_true_from_its_text(ask: Asker) -> None:
    (answer,) = ask([CHOICE])["answers"]
    rows = answer["probabilities"]
    assert [row["value"] for row in rows] == [True, "true", "desk"]
    assert [type(row["value"]) for row in rows] == [bool, str, str]
    assert sum(row["probability"] for row in rows) == pytest.approx(1, abs=1e-9)
    best = max(rows, key=lambda row: row["probability"])
    assert answer["choice"] == best["value"]
    assert type(answer["choice"]) is type(best["value"])
    assert 0 < answer["confidence"] <= best["probability"]


def test_a_score_is_the_mean_level(ask: Asker) -> None:
    (answer,) = ask([SCORE])["answers"]
    rows = answer["probabilities"]
    assert [(row["value"], row["label"]) for row in rows] == [
        (0, "dark"),
        (1, "dim"),
        (2, "bright"),
    ]
    mean = sum(row["value"] * row["probability"] for row in rows)
    assert answer["score"] == pytest.approx(mean, abs=1e-9)


def test_answers_come_in_order_with_their_names(ask: Asker) -> None:
    answers = ask([CHOICE, PREDICATE, {**SCORE, "name": "s"}, CHOICE])["answers"]
    assert [(a["type"], a["name"]) for a in answers] == [
        ("choice", "which"),
        ("predicate", None),
        ("score", "s"),
        ("choice", "which"),
    ]
    assert answers[0] == answers[3]


def test_usage_adds_up(ask: Asker) -> None:
    told = ask([PREDICATE, CHOICE], return_prompt_token_ids=True)
    usage = told["usage"]
    assert usage["input_tokens"] == sum(len(a["prompt_token_ids"]) for a in told["answers"])
    assert usage["total_tokens"] == usage["input_tokens"]
    assert usage["output_tokens"] == usage["output_tokens_details"]["reasoning_tokens"] == 0


def test_roles_calls_and_json(ask: Asker) -> None:
    items = [
        {"role": "developer", "content": "Be strict."},
        {"role": "system", "content": "Lamps only."},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Look:"},
                {"type": "input_json", "data": [{"lamp": "red"}, {"lamp": None}]},
            ],
        },
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "It is red."},
        {"type": "custom_tool_call", "call_id": "d", "name": "sh", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "lamp"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Red, then."}]},
    ]
    assert len(ask([PREDICATE], items)["answers"]) == 1


def test_an_output_needs_its_call(ask: Asker) -> None:
    items = [{"type": "function_call_output", "call_id": "lost", "output": "x"}]
    assert "lost" in ask.refused([PREDICATE], items)


def test_pictures_are_refused(ask: Asker) -> None:
    part = {"type": "input_image", "image_url": "data:image/png;base64,"}
    assert "input_image" in ask.refused([PREDICATE], [{"role": "user", "content": [part]}])


def test_from_1_to_400_questions(ask: Asker) -> None:
    for count in (0, 401):
        assert "1 to 400" in ask.refused([PREDICATE] * count)
    answers = ask([PREDICATE] * 100)["answers"]
    assert len(answers) == 100
    assert all(answer == answers[0] for answer in answers)


def test_from_2_to_255_choices(ask: Asker) -> None:
    for count in (1, 256):
        assert "2 to 255" in ask.refused([choices(count)])
    (answer,) = ask([choices(255)])["answers"]
    rows = answer["probabilities"]
    assert [row["value"] for row in rows] == [f"v{i}" for i in range(255)]
    assert sum(row["probability"] for row in rows) == pytest.approx(1, abs=1e-9)


def test_from_2_to_10_levels(ask: Asker) -> None:
    for count in (1, 11):
        assert "2 to 10" in ask.refused([levels(count)])
    assert len(ask([levels(10)])["answers"][0]["probabilities"]) == 10


def test_choices_differ(ask: Asker) -> None:
    twice = {**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}
    assert "twice" in ask.refused([PREDICATE, twice])


@pytest.mark.parametrize(
    ("question", "named"),
    [
        ({**PREDICATE, "type": "number"}, "questions[0].type"),
        ({"type": "predicate"}, "questions[0].instructions"),
        ({"instructions": "x"}, "questions[0].type"),
        ({"type": "choice", "instructions": "x"}, "questions[0].choices"),
        ({"type": "score", "instructions": "x"}, "questions[0].levels"),
    ],
)
def test_what_is_wrong_is_named(ask: Asker, question: dict[str, Any], named: str) -> None:
    assert named in ask.refused([question])


def test_fields_that_are_missing(ask: Asker) -> None:
    for body, named in (({"questions": [PREDICATE]}, "input"), ({"input": "x"}, "questions")):
        reply = ask.post("/v1/decisions", body)
        assert reply.status_code == 400
        assert named in reply.json()["error"]["message"]


def test_an_unknown_model_is_not_found(ask: Asker) -> None:
    body = {"model": "nobody", "input": "x", "questions": [PREDICATE]}
    assert ask.post("/v1/decisions", body).status_code == 404


def test_what_is_too_long_names_its_question(ask: Asker) -> None:
    long = {**PREDICATE, "instructions": "lamp " * 20_000}
    body = {"input": "x", "questions": [PREDICATE, long]}
    error = ask.post("/v1/decisions", body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("questions[1]: ")


def test_the_clients_cache_fields_are_taken(ask: Asker) -> None:
    """A mark and a time keep the input, and explicit mode leaves nothing behind its last mark."""
    kept = {"type": "input_text", "text": f"{DOCUMENT} Marked.", "prompt_cache_breakpoint": None}
    mark = {"mode": "explicit", "ttl": "30m"}
    items = [
        {
            "role": "user",
            "content": [
                {**kept, "prompt_cache_breakpoint": mark},
                {"type": "input_text", "text": "Behind it. " * 40},
            ],
        }
    ]
    body = {
        "input": items,
        "questions": ASKED[:3],
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
        "safety_identifier": "s",
    }
    first = ask.post("/v1/decisions", body)
    assert first.status_code == 200, first.text
    assert "x-ignored-fields" not in first.headers
    details = first.json()["usage"]["input_tokens_details"]
    # The second and the third question hit what lies before the mark, and nothing else stays.
    shared = details["cached_tokens"] // 2
    assert shared > 0
    assert shared % UNIT == 0
    assert details["cache_write_tokens"] == shared
    again = ask.post("/v1/decisions", body).json()
    assert again["usage"]["input_tokens_details"] == {
        "cached_tokens": 3 * shared,
        "cache_write_tokens": 0,
    }
    assert again["answers"] == first.json()["answers"]


def test_hits_are_as_many_as_there_can_be(cpu_server: ServerProcess, ask: Asker) -> None:
    def counted() -> float:
        cpu_server.wait_idle()
        return sum_series(cpu_server.get("/metrics").text, "vllm:prefix_cache_hits_total")

    before = counted()
    first = ask(ASKED, DOCUMENT, return_prompt_token_ids=True, cache_salt="hits")
    prompts = [answer["prompt_token_ids"] for answer in first["answers"]]
    columns = enumerate(zip(*prompts, strict=False))
    shared = next(i for i, column in columns if len(set(column)) > 1) // UNIT * UNIT
    assert shared > 700
    assert first["usage"]["input_tokens_details"]["cached_tokens"] == 7 * shared
    assert counted() - before == 7 * shared
    again = ask(ASKED, DOCUMENT, return_prompt_token_ids=True, cache_salt="hits")
    whole = sum((len(prompt) - 1) // UNIT * UNIT for prompt in prompts)
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == whole
    assert again["answers"] == first["answers"]
    new = [{**PREDICATE, "instructions": "Is any lamp green?"}]
    assert ask.cached(new, cache_salt="hits") == shared
    assert ask.cached(ASKED[:1], cache_salt="nobody else's") == 0


def test_bits_do_not_depend_on_company(ask: Asker) -> None:
    together = ask([CHOICE, *ASKED, SCORE], DOCUMENT, cache_salt="all")["answers"]
    for index in (0, 3, 9):
        question = [CHOICE, *ASKED, SCORE][index]
        (alone,) = ask([question], DOCUMENT, cache_salt=f"alone {index}".replace(" ", "-"))[
            "answers"
        ]
        assert alone == together[index]


def test_probabilities_are_those_of_completions(ask: Asker) -> None:
    (answer,) = ask([SCORE], return_prompt_token_ids=True)["answers"]
    weights = []
    for label in answer["label_token_ids"]:
        body = {
            "prompt": answer["prompt_token_ids"],
            "allowed_token_ids": label,
            "max_tokens": 1,
            "logprobs": 0,
        }
        (choice,) = ask.post("/v1/completions", body).json()["choices"]
        weights.append(math.exp(choice["logprobs"]["token_logprobs"][0]))
    expected = [weight / sum(weights) for weight in weights]
    found = [row["probability"] for row in answer["probabilities"]]
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/systemone"])
def test_system_one(ask: Asker, path: str) -> None:
    questions = {
        "hot": {"type": "noul", "instructions": "Is it hot?", "criteria": {"true": "it glows"}},
        "kind": {
            "type": "choice",
            "instructions": "Which?",
            "criteria": {"desk": "low", "x": None},
        },
        "risk": {"type": "score", "instructions": "How bad?", "criteria": ["not", "a bit", "very"]},
    }
    reply = ask.post(path, {"state": {"lamp": "red"}, "questions": questions})
    assert reply.status_code == 200, reply.text
    answers = reply.json()["answers"]
    assert list(answers) == list(questions)
    assert 0 < answers["hot"]["noul"] < 1
    assert answers["kind"]["choice"] in ("desk", "x")
    assert sum(answers["risk"]["probabilities"].values()) == pytest.approx(1, abs=1e-9)
