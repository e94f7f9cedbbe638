"""``/v1/decisions`` and ``/v1/systemone`` over an engine that says what it is told."""

import math
from collections.abc import Callable
from typing import Any

import openai.types
import pytest

from tests.entrypoints.openai.conftest import Served
from vllm.exceptions import TenantLimitError

PREDICATE = {"type": "predicate", "instructions": "Is it red?"}
CHOICE = {
    "type": "choice",
    "name": "which",
    "instructions": "Which?",
    "choices": [{"value": True}, {"value": "true", "description": "the text"}, {"value": "no"}],
}
SCORE = {
    "type": "score",
    "instructions": [{"type": "input_text", "text": "How much?"}],
    "levels": [{"label": "low"}, {"label": "high", "description": "more"}],
}
TEXT = "The quick brown fox. " * 30


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """An application with room."""
    return serve(served_model={"max_model_len": 4096})


async def ask(served: Served, body: dict[str, Any], path: str = "/v1/decisions") -> dict[str, Any]:
    reply = await served.client.post(path, json={"model": "tiny", **body})
    assert reply.status_code == 200, reply.text
    told: dict[str, Any] = reply.json()
    return told


def many_choices(count: int) -> dict[str, Any]:
    choices = [{"value": f"v{i}"} for i in range(count)]
    return {"type": "choice", "instructions": "Which?", "choices": choices}


async def test_the_three_types_in_order(served: Served) -> None:
    questions = [CHOICE, PREDICATE, SCORE, {**PREDICATE, "name": "p"}]
    told = await ask(served, {"input": TEXT, "questions": questions})
    parsed = openai.types.Decision.model_validate(told, strict=True)
    assert [answer.type for answer in parsed.answers] == [
        "choice",
        *("predicate", "score"),
        "predicate",
    ]
    assert [answer.name for answer in parsed.answers] == ["which", None, None, "p"]
    choice, predicate, score, _ = told["answers"]
    # Labels at -1, -2, -3.
    weights = [math.exp(-i) for i in range(3)]
    expected = [weight / sum(weights) for weight in weights]
    assert [entry["probability"] for entry in choice["probabilities"]] == pytest.approx(expected)
    assert [entry["value"] for entry in choice["probabilities"]] == [True, "true", "no"]
    assert choice["choice"] is True
    mass = sum(math.exp(-1 - i) for i in range(3))
    assert choice["confidence"] == pytest.approx(expected[0] * mass)
    assert predicate["probability"] == pytest.approx(1 / (1 + math.exp(-1)))
    assert score["score"] == pytest.approx(1 - predicate["probability"])
    assert [(e["value"], e["label"]) for e in score["probabilities"]] == [(0, "low"), (1, "high")]
    usage = told["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] > 0 == usage["output_tokens"]
    assert told["prompt_format_version"] == 1


async def test_one_prompt_goes_first_and_all_know_where_they_part(served: Served) -> None:
    body = {"input": TEXT, "questions": [PREDICATE, SCORE, CHOICE], "return_prompt_token_ids": True}
    told = await ask(served, body)
    assert served.engine.together == [1, 2]
    prompts = [answer["prompt_token_ids"] for answer in told["answers"]]
    assert [job[0] for job in served.engine.jobs] == prompts
    columns = enumerate(zip(*prompts, strict=False))
    shared = next(i for i, column in columns if len(set(column)) > 1)
    for options in served.engine.options:
        assert options.cache_junctions[-1] == shared
    head = served.context.tokenizer.decode(
        prompts[0][: served.engine.options[0].cache_junctions[0]]
    )
    assert head.endswith("Question about the above:\n")
    params = [job[1] for job in served.engine.jobs]
    assert all(p.max_tokens == 1 and p.is_greedy and not p.detokenize for p in params)
    assert [len(p.logprob_token_ids or ()) for p in params] == [2, 2, 3]


async def test_many_choices_are_a_trie(served: Served) -> None:
    told = await ask(
        served,
        {
            "input": TEXT,
            "questions": [many_choices(255)],
            "return_label_logprobs": True,
            "return_prompt_token_ids": True,
        },
    )
    (answer,) = told["answers"]
    assert len(answer["probabilities"]) == 255
    assert sum(entry["probability"] for entry in answer["probabilities"]) == pytest.approx(1)
    paths = [tuple(path) for path in answer["label_token_ids"]]
    assert len(set(paths)) == 255
    branches: dict[tuple[int, ...], list[int]] = {}
    for path in paths:
        for depth, token_id in enumerate(path):
            known = branches.setdefault(path[:depth], [])
            known += [token_id] * (token_id not in known)
    # The engine answers -1, -2, ... in the order in which the tokens are named.
    expected = [
        sum(-1.0 - branches[path[:i]].index(path[i]) for i in range(len(path))) for path in paths
    ]
    assert answer["label_logprobs"] == expected
    assert max(map(len, paths)) == 2
    assert served.engine.together == [1, len(branches) - 1]
    jobs = served.engine.jobs
    assert all(job[0][:-1] == jobs[0][0] for job in jobs[1:])
    assert told["usage"]["input_tokens"] == len(jobs[0][0])


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": {"a": PREDICATE}}, "questions"),
        ({"questions": [5]}, "questions[0]"),
        ({"questions": None}, "questions"),
        ({"questions": [PREDICATE, {"type": "guess", "instructions": "x"}]}, "questions[1].type"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
        ({"questions": [{**PREDICATE, "instructions": " "}]}, "questions[0].instructions"),
        ({"questions": [{**PREDICATE, "instructions": []}]}, "questions[0].instructions"),
        ({"questions": [{**PREDICATE, "name": 5}]}, "questions[0].name"),
        ({"questions": [many_choices(1)]}, "questions[0].choices"),
        ({"questions": [many_choices(256)]}, "questions[0].choices"),
        ({"questions": [{**CHOICE, "choices": [{"value": 1}, {"value": 2}]}]}, "choices[0].value"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]}, "choices[1].value"),
        ({"questions": [{**CHOICE, "choices": [{"value": True}] * 2}]}, "choices[1].value"),
        ({"questions": [{**CHOICE, "choices": ["a", "b"]}]}, "choices[0]"),
        ({"questions": [{**SCORE, "levels": [{"label": "a"}]}]}, "questions[0].levels"),
        ({"questions": [{**SCORE, "levels": [{"label": "a"}] * 11}]}, "questions[0].levels"),
        ({"questions": [{**SCORE, "levels": [{"label": 1}] * 2}]}, "levels[0].label"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "judge", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "video"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "lost", "output": "x"}]},
            "lost",
        ),
        ({"input": [{"type": "reasoning"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_json", "data": 5}]}]}, "data"),
        ({"state": "x"}, "state"),
        ({"stream": True}, "stream"),
        ({"x_permutations": 0}, "x_permutations"),
        ({"x_permutations": 17}, "x_permutations"),
        ({"prompt_format_version": 2}, "prompt_format_version"),
        ({"safety_identifier": "s" * 129}, "safety_identifier"),
        ({"prompt_cache_options": {"mode": "never"}}, "prompt_cache_options.mode"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"priority": 5}, "priority"),
    ],
)
async def test_what_is_wrong_is_named(served: Served, change: dict[str, Any], where: str) -> None:
    body = {"model": "tiny", "input": TEXT, "questions": [PREDICATE], **change}
    reply = await served.client.post("/v1/decisions", json=body)
    assert reply.status_code == 400, reply.text
    assert where in reply.json()["error"]["message"]
    assert served.engine.jobs == []


async def test_json_that_is_too_large_is_refused(served: Served) -> None:
    deep: Any = 1
    for _ in range(33):
        deep = {"a": deep}
    for data in (deep, {"a": [1] * 10_001}, {"a": "x" * (256 * 1024)}):
        part = {"type": "input_json", "data": data}
        body = {"input": [{"role": "user", "content": [part]}], "questions": [PREDICATE]}
        reply = await served.client.post("/v1/decisions", json=body)
        assert reply.status_code == 400
        assert "input[0].content[0].data" in reply.json()["error"]["message"]


async def test_models_and_lengths(served: Served) -> None:
    body = {"model": "other", "input": TEXT, "questions": [PREDICATE]}
    assert (await served.client.post("/v1/decisions", json=body)).status_code == 404
    long = {**PREDICATE, "instructions": "fox " * 5000}
    for given in ({"input": TEXT, "questions": [PREDICATE, long]}, {"input": "fox " * 5000}):
        body = {"questions": [PREDICATE], **given}
        reply = await served.client.post("/v1/decisions", json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith(f"questions[{len(body['questions']) - 1}]: ")
    assert served.engine.jobs == []


async def test_all_kinds_of_input_are_shown(served: Served) -> None:
    items = [
        {"role": "developer", "content": "Be strict."},
        {
            "role": "user",
            "type": "message",
            "content": [
                {
                    "type": "input_text",
                    "text": "Look at <|end|>:",
                    "prompt_cache_breakpoint": {"mode": "explicit"},
                },
                {"type": "input_json", "data": {"weight": [1, None]}},
            ],
        },
        {"role": "assistant", "phase": "commentary", "content": "I look."},
        {"type": "function_call", "call_id": "c1", "name": "put_on_scale", "arguments": '{"x": 1}'},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "two kilos"}],
        },
        {"type": "custom_tool_call", "call_id": "c2", "name": "shell", "input": "ls -l"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "nothing"},
        {
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "It is heavy."},
                {"type": "refusal", "refusal": "No more."},
            ],
        },
    ]
    questions = [{**PREDICATE, "instructions": [{"type": "input_json", "data": {"q": 1}}]}]
    await ask(served, {"input": items, "questions": questions})
    text = served.context.tokenizer.decode(served.engine.jobs[0][0], skip_special_tokens=False)
    shown = [
        "Be strict.",
        "Look at <|end|>:",
        '{"weight":[1,null]}',
        "I look.",
        "put_on_scale",
        "two kilos",
    ]
    shown += ["shell", "ls -l", "nothing", "It is heavy.No more.", "Question about", '{"q":1}']
    places = [text.index(part) for part in shown]
    assert places == sorted(places)
    assert text.endswith("of one option only.<｜Assistant｜></think>")
    (mark,) = served.engine.boundaries[0]
    cut = served.context.tokenizer.decode(served.engine.jobs[0][0][:mark])
    assert cut.endswith("Look at <|end|>:") or cut.endswith("Look at <|end|>:\n")


async def test_what_a_client_says_of_a_request_reaches_the_engine(served: Served) -> None:
    body = {"input": TEXT, "questions": [PREDICATE, SCORE]}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"prompt_cache_key": "k"}, {"prompt_cache_key": "k"}),
        ({"cache_salt": "s"}, {"cache_salt": "s"}),
        ({"skip_cache_insert": True}, {"skip_cache_insert": True}),
    ]
    for fields, expected in cases:
        served.engine.options.clear()
        await ask(served, {**body, **fields})
        for options in served.engine.options:
            assert {name: getattr(options, name) for name in expected} == expected
    told = await ask(served, {**body, "skip_cache_insert": True})
    assert told["usage"]["input_tokens_details"]["cache_write_tokens"] == 0


def marked(*ttls: str | None, then: str = TEXT) -> list[dict[str, Any]]:
    marks = [{"mode": "explicit", **({"ttl": ttl} if ttl else {})} for ttl in ttls]
    parts: list[dict[str, Any]] = [
        {"type": "input_text", "text": f"{i}. {TEXT}", "prompt_cache_breakpoint": mark}
        for i, mark in enumerate(marks)
    ]
    return [{"role": "user", "content": [*parts, {"type": "input_text", "text": then}]}]


async def test_a_time_to_live_is_that_of_marks_and_of_what_the_questions_share(
    served: Served,
) -> None:
    questions = [PREDICATE, SCORE]
    cases: list[tuple[Any, dict[str, str], list[float | None]]] = [
        (TEXT, {}, [None]),
        (TEXT, {"ttl": "30m"}, [1800.0]),
        (marked(None, "12h"), {}, [None, 43200.0, None]),
        (marked(None, "12h"), {"mode": "implicit", "ttl": "30m"}, [1800.0, 43200.0, 1800.0]),
        (marked(None, "12h"), {"mode": "explicit", "ttl": "30m"}, [1800.0, 43200.0, None]),
    ]
    for given, asked, expected in cases:
        served.engine.options.clear()
        body = {"input": given, "questions": questions, "prompt_cache_options": asked}
        reply = await served.client.post("/v1/decisions", json=body)
        assert reply.status_code == 200, reply.text
        assert "x-ignored-fields" not in reply.headers
        for options in served.engine.options:
            places = [*options.cache_boundaries, options.cache_junctions[-1]]
            assert places == sorted(places)
            assert [options.cache_ttls.get(place) for place in places] == expected


async def test_explicit_mode_leaves_nothing_behind_the_last_mark(served: Served) -> None:
    body = {"input": marked(None, None), "questions": [PREDICATE, SCORE]}
    asked = {"mode": "explicit", "prewarm": True, "comparison_response_id": "r"}
    reply = await served.client.post("/v1/decisions", json={**body, "prompt_cache_options": asked})
    assert reply.headers["x-ignored-fields"] == (
        "prompt_cache_options.comparison_response_id, prompt_cache_options.prewarm"
    )
    for options in served.engine.options:
        assert options.cache_insert_end == options.cache_boundaries[-1] < options.cache_junctions[0]
    unit = served.context.config.cache_config.block_size
    left = served.engine.options[0].cache_insert_end // unit * unit
    details = reply.json()["usage"]["input_tokens_details"]
    assert details == {"cached_tokens": 0, "cache_write_tokens": 2 * left}


@pytest.mark.parametrize(
    "mark", [{"mode": "implicit"}, "explicit", {"mode": "explicit", "ttl": "5m"}]
)
async def test_wrong_marks_are_named(served: Served, mark: Any) -> None:
    part = {"type": "input_text", "text": "x", "prompt_cache_breakpoint": mark}
    body = {"input": [{"role": "user", "content": [part]}], "questions": [PREDICATE]}
    reply = await served.client.post("/v1/decisions", json=body)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert message.startswith("input[0].content[0].prompt_cache_breakpoint")


async def test_explicit_mode_without_marks_shares_with_itself_alone(served: Served) -> None:
    served.engine.num_cached_tokens = 64
    body = {
        "input": TEXT,
        "questions": [PREDICATE, SCORE],
        "prompt_cache_options": {"mode": "explicit"},
    }
    salts = set()
    for _ in range(2):
        served.engine.options.clear()
        details = (await ask(served, body))["usage"]["input_tokens_details"]
        assert details == {"cached_tokens": 0, "cache_write_tokens": 0}
        (salt,) = {options.cache_salt for options in served.engine.options}
        salts.add(salt)
    assert len(salts) == 2
    assert None not in salts


async def test_orders_are_averaged(served: Served) -> None:
    """The engine likes what stands first: asked in every order, no option is preferred."""
    told = await ask(served, {"input": TEXT, "questions": [CHOICE, PREDICATE], "x_permutations": 3})
    choice, predicate = told["answers"]
    assert [e["probability"] for e in choice["probabilities"]] == pytest.approx([1 / 3] * 3)
    assert predicate["probability"] == pytest.approx(1 / 2)
    assert len(served.engine.jobs) == 5
    assert told["usage"]["input_tokens"] == sum(len(job[0]) for job in served.engine.jobs)


async def test_settings_of_the_server(serve: Callable[..., Served]) -> None:
    from vllm.entrypoints.openai.server_args import DecisionArgs

    args = DecisionArgs(temperature=2.0, refusal_mass=0.52)
    served = serve(served_model={"max_model_len": 4096}, decisions=args)
    # Two labels have a mass of 0.503, three of 0.553.
    told = await ask(served, {"input": TEXT, "questions": [CHOICE, {**PREDICATE, "name": "p"}]})
    openai.types.Decision.model_validate(told, strict=True)
    assert told["answers"][1] == {"type": "refusal", "name": "p"}
    weights = [math.exp(-i / 2) for i in range(3)]
    expected = [weight / sum(weights) for weight in weights]
    given = [entry["probability"] for entry in told["answers"][0]["probabilities"]]
    assert given == pytest.approx(expected)


@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/systemone"])
async def test_system_one(served: Served, path: str) -> None:
    questions = {
        "sure": {"type": "noul", "instructions": "Red?", "criteria": {"true": "it glows"}},
        "plain": {"type": "noul", "instructions": "Red?"},
        "which": {"type": "choice", "instructions": "?", "criteria": {"a": "first", "b": None}},
        "one": {"type": "choice", "instructions": "?", "criteria": {"a": None}},
        "much": {"type": "score", "instructions": "?", "criteria": ["low", "mid", "high"]},
    }
    told = await ask(served, {"state": {"lamp": "red"}, "questions": questions}, path)
    assert list(told["answers"]) == list(questions)
    answers = told["answers"]
    assert answers["sure"]["noul"] == answers["plain"]["noul"] > 0.5
    assert answers["which"]["choice"] == "a"
    assert list(answers["which"]["probabilities"]) == ["a", "b"]
    assert answers["one"]["probabilities"] == {"a": 1.0}
    assert list(answers["much"]["probabilities"]) == ["0", "1", "2"]
    assert answers["much"]["legend"] == {"0": "low", "1": "mid", "2": "high"}
    assert 0 < answers["much"]["score"] < 1
    assert told["usage"]["output_tokens"] == 0
    text = served.context.tokenizer.decode(served.engine.jobs[0][0])
    assert '{"lamp":"red"}' in text
    assert "A. Yes: it glows" in text


@pytest.mark.parametrize(
    "question",
    [
        {"type": "noul"},
        {"type": "predicate", "instructions": "x"},
        {"type": "noul", "instructions": "x", "criteria": {"maybe": "y"}},
        {"type": "choice", "instructions": "x", "criteria": {}},
        {"type": "choice", "instructions": "x", "criteria": ["a", "b"]},
        {"type": "score", "instructions": "x", "criteria": []},
        {"type": "score", "instructions": "x", "criteria": ["a"] * 11},
        {"type": "score", "instructions": "x", "criteria": [1, 2]},
    ],
)
async def test_system_one_names_what_is_wrong(served: Served, question: dict[str, Any]) -> None:
    body = {"state": "x", "questions": {"mine": question}}
    reply = await served.client.post("/v1/systemone", json=body)
    assert reply.status_code == 400
    assert "questions.mine" in reply.json()["error"]["message"]


async def test_unknown_fields_are_told(served: Served) -> None:
    body = {"input": TEXT, "questions": [{**PREDICATE, "threshold": 1}], "temperature": 0.5}
    reply = await served.client.post("/v1/decisions", json=body)
    assert set(reply.headers["x-ignored-fields"].split(", ")) == {
        "questions[0].threshold",
        "temperature",
    }


async def test_a_failure_ends_all_reads(served: Served) -> None:
    served.engine.refuse = TenantLimitError("Too much.", "tokens_per_minute", 7)
    body = {"input": TEXT, "questions": [PREDICATE, SCORE]}
    reply = await served.client.post("/v1/decisions", json=body)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")
    served.engine.refuse = None
    served.engine.fail_at = 0
    reply = await served.client.post("/v1/decisions", json=body)
    assert reply.status_code == 500
    assert served.engine.num_running == 0
