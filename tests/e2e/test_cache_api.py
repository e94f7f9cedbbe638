"""The cache as an API: what one server answers by raw HTTP, and what both SDKs make of it."""

import collections
import itertools
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import anthropic.types
import httpx
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import BaseModel

from tests.e2e.server_process import NO_TLS, ServerProcess

UNIT = 32
_NUMBERS = itertools.count(1)
STORY = "The garden is quiet, and it rained all day in the town by the sea. " * 28
TOOLS = [
    {"name": name, "description": "Looks up.", "input_schema": {"type": "object"}}
    for name in ("find", "read")
]
Json = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("cache_api")
    environment = {"VLLM_CHECK_INVARIANTS": "1", "VLLM_CPU_KVCACHE_SPACE": "0.06"}
    environment |= {"VLLM_SERVER_DEV_MODE": "1"}
    flags = ("--enable-prompt-tokens-details",)
    with ServerProcess(folder / "log.txt", *flags, environment=environment) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120, verify=NO_TLS) as client:
        yield client


def fresh(words: str = "") -> str:
    """A text of about 450 tokens that no test has sent yet."""
    return f"Story {next(_NUMBERS)}. {words} {STORY}"


def full(num_tokens: int) -> int:
    """Return what a resend of a prompt hits."""
    return (num_tokens - 1) // UNIT * UNIT


def respond(http: httpx.Client, said: str, status: int = 200, **fields: Any) -> Json:
    headers = fields.pop("headers", {})
    body = {"input": said, "max_output_tokens": 3, "temperature": 0, **fields}
    reply = http.post("/v1/responses", json=body, headers=headers)
    assert reply.status_code == status, reply.text
    told: Json = reply.json()
    if status == 200:
        openai.types.responses.Response.model_validate(told)
    return told


def compared(http: httpx.Client, said: str, earlier: str | None, **fields: Any) -> Json:
    options = {"comparison_response_id": earlier, **fields.pop("options", {})}
    return respond(http, said, prompt_cache_options=options, **fields)


def message(http: httpx.Client, text: str, status: int = 200, **fields: Any) -> Json:
    return _say(http, "/v1/messages", anthropic.types.Message, text, status, **fields)


def chat(http: httpx.Client, text: str, status: int = 200, **fields: Any) -> Json:
    kind = openai.types.chat.ChatCompletion
    return _say(http, "/v1/chat/completions", kind, text, status, **fields)


def _say(
    http: httpx.Client, path: str, kind: type[BaseModel], text: str, status: int, **fields: Any
) -> Json:
    headers = fields.pop("headers", {})
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, **fields}
    reply = http.post(path, json=body, headers=headers)
    assert reply.status_code == status, reply.text
    told: Json = reply.json()
    if status == 200:
        kind.model_validate(told)
    return told


def cached(told: Json) -> int:
    """Return the hit of an answer of any API."""
    usage = told["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("input_tokens_details") or usage["prompt_tokens_details"]
    return int(details["cached_tokens"])


def ask(previous: Json | None = None) -> Json:
    """Return the field that opts in, or asks what differs from an earlier message."""
    return {"diagnostics": {"previous_message_id": previous and previous["id"]}}


def sent_events(http: httpx.Client, path: str, body: Json) -> list[Json]:
    """Return the events of a stream."""
    text = http.post(path, json={**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


# ---- the Responses API ---------------------------------------------------------------------------


def test_a_resend_is_a_hit_and_without_a_comparison_there_is_no_diagnosis(
    http: httpx.Client,
) -> None:
    text = fresh()
    first = compared(http, text, None)
    assert first["prompt_cache_diagnostics"] is None
    assert first["prompt_cache_options"]["mode"] == "implicit"
    second = compared(http, text, first["id"])
    assert second["prompt_cache_diagnostics"]["type"] == "cache_hit"
    assert cached(second) == full(second["usage"]["input_tokens"])
    options = {"mode": "implicit", "ttl": "30m", "comparison_response_id": first["id"]}
    assert second["prompt_cache_options"] == options
    # Going on with it is a hit, too.
    third = compared(http, "And then?", first["id"], previous_response_id=first["id"])
    assert third["prompt_cache_diagnostics"]["type"] == "cache_hit"


FUNCTION: Json = {"type": "function", "name": "find", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ({"instructions": "Be short."}, {"instructions": "Be long."}, "input_changed"),
        (
            {"tools": [FUNCTION]},
            {"tools": [{**FUNCTION, "name": "seek"}]},
            "tools_changed",
        ),
        (
            {"reasoning": {"effort": "none"}},
            {"reasoning": {"effort": "max"}},
            "reasoning_effort_changed",
        ),
        (
            {},
            {"text": {"format": {"type": "json_object"}}},
            "text_format_changed",
        ),
        ({"prompt_cache_key": "a"}, {"prompt_cache_key": "b"}, "prompt_cache_key_changed"),
    ],
)
def test_what_changed_is_named_or_was_hit_all_the_same(
    http: httpx.Client, before: Json, after: Json, reason: str
) -> None:
    said = fresh()
    first = respond(http, said, **before)
    told = compared(http, said, first["id"], **after)
    diagnosis, num_tokens = told["prompt_cache_diagnostics"], told["usage"]["input_tokens"]
    if diagnosis["type"] == "cache_hit":
        assert cached(told) == full(min(num_tokens, first["usage"]["input_tokens"]))
        return
    assert (diagnosis["type"], diagnosis["reason"]) == ("cache_miss", reason)
    assert 300 < diagnosis["cache_missed_tokens"] <= num_tokens
    place = diagnosis["first_difference"]["token_offset"]
    assert diagnosis["cache_missed_tokens"] == num_tokens - place // UNIT * UNIT


def test_an_edited_first_message_is_named(http: httpx.Client) -> None:
    text = fresh()
    first = respond(http, text)
    told = compared(http, "Oh! " + text, first["id"])["prompt_cache_diagnostics"]
    assert (told["reason"], told["first_difference"]["message_index"]) == ("input_changed", 0)
    assert told["cache_missed_tokens"] > 300


def test_an_unknown_a_deleted_and_another_salts_response_are_not_found(http: httpx.Client) -> None:
    text = fresh()
    first, salted = respond(http, text), respond(http, text, cache_salt="one")
    assert http.delete(f"/v1/responses/{first['id']}").status_code == 200
    for earlier in ("resp_nobody", first["id"], salted["id"]):
        told = compared(http, text, earlier)["prompt_cache_diagnostics"]
        assert told["type"] == "comparison_response_not_found"


def _num_shared(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def test_a_hit_is_told_iff_the_last_unit_that_both_can_share_was_hit(http: httpx.Client) -> None:
    """Random edits, appended turns and lost caches, against the rendered tokens of both."""
    rng = random.Random(46)

    def words(count: int) -> str:
        return " ".join(f"word{rng.randrange(1000)}" for _ in range(count))

    def tokens(rules: str, turns: list[str]) -> list[int]:
        said = _turns(turns)
        body = {"messages": [{"role": "system", "content": rules}, *said]}
        return list(http.post("/tokenize", json=body).json()["tokens"])

    def send(rules: str, turns: list[str], earlier: str | None = None) -> Json:
        options = {} if earlier is None else {"comparison_response_id": earlier}
        body = {"instructions": rules, "input": _turns(turns), "prompt_cache_options": options}
        body |= {"max_output_tokens": 1, "temperature": 0}
        return http.post("/v1/responses", json=body).raise_for_status().json()

    told_types: collections.Counter[str] = collections.Counter()
    for _ in range(60):
        rules, turns = words(rng.randrange(5, 40)), [words(rng.randrange(20, 90))]
        old, first = tokens(rules, turns), send(rules, turns)
        kind = rng.choice(["same", "appended", "last word", "any word", "rules", "longer"])
        goes_on = kind in ("same", "appended")
        if kind == "appended":
            turns = [*turns, words(5), words(rng.randrange(1, 60))]
        elif kind == "rules":
            rules = words(1) + rules
        elif kind != "same":
            said = turns[0].split()
            at = len(said) - 1 if kind != "any word" else rng.randrange(len(said))
            said[at] = words(1 if kind != "longer" else 40)
            turns = [" ".join(said)]
        if rng.random() < 0.3:
            assert http.post("/reset_prefix_cache", json={}).status_code == 200
        new, told = tokens(rules, turns), send(rules, turns, first["id"])
        assert (told["usage"]["input_tokens"], first["usage"]["input_tokens"]) == (
            len(new),
            len(old),
        )
        reach = min(full(len(old)), full(len(new)))
        if goes_on:  # what opened the first answer need not stand in front of a second turn
            reach = min(reach, _num_shared(old, new) // UNIT * UNIT)
        diagnosis = told["prompt_cache_diagnostics"]["type"]
        assert (diagnosis == "cache_hit") is (cached(told) >= reach), (kind, told)
        assert goes_on is False or diagnosis in ("cache_hit", "unavailable"), (kind, told)
        told_types[diagnosis] += 1
    assert min(told_types[name] for name in ("cache_hit", "cache_miss", "unavailable")) > 5


def _turns(texts: list[str]) -> list[Json]:
    return [
        {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)
    ]


def test_a_stream_and_a_later_look_tell_the_same(http: httpx.Client) -> None:
    text = fresh()
    first = respond(http, text)
    body = {"input": text + "!", "max_output_tokens": 3}
    body["prompt_cache_options"] = {"comparison_response_id": first["id"]}
    last = sent_events(http, "/v1/responses", body)[-1]["response"]
    later = http.get(f"/v1/responses/{last['id']}").json()
    assert later["prompt_cache_diagnostics"] == last["prompt_cache_diagnostics"] is not None


@pytest.mark.parametrize(
    "wrong",
    [{"ttl": "99h"}, {"mode": "never"}, {"comparison_response_id": 5}, {"prewarm": "yes"}],
)
def test_values_that_do_not_exist_name_their_field(http: httpx.Client, wrong: Json) -> None:
    ((field, _),) = wrong.items()
    for told in (
        respond(http, "Hello", 400, prompt_cache_options=wrong),
        chat(http, "Hello", 400, prompt_cache_options=wrong),
    ):
        assert told["error"]["param"] == f"prompt_cache_options.{field}"
    assert respond(http, "Hello", prompt_cache_options={"ttl": "12h"})["status"] != "failed"


def test_explicit_without_marks_leaves_the_cache_alone(http: httpx.Client) -> None:
    text = fresh()
    for send in (respond, chat):
        told = send(http, text, prompt_cache_options={"mode": "explicit"})
        details = (
            told["usage"].get("input_tokens_details") or told["usage"]["prompt_tokens_details"]
        )
        assert (details["cached_tokens"], details["cache_write_tokens"]) == (0, 0)
    assert cached(respond(http, text)) == 0


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_explicit_with_a_mark_leaves_what_is_before_it(http: httpx.Client, api: str) -> None:
    marked, rest = fresh(), f" {STORY}"
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    texts = [{"text": marked, **mark}, {"text": rest}]
    options = {"prompt_cache_options": {"mode": "explicit"}}
    hits = []
    for fields in (options, options, {}):
        if api == "chat":
            content = [{"type": "text", **part} for part in texts]
            told = chat(http, "", messages=[{"role": "user", "content": content}], **fields)
            written = told["usage"]["prompt_tokens_details"]["cache_write_tokens"]
        else:
            content = [{"type": "input_text", **part} for part in texts]
            told = respond(http, [{"role": "user", "content": content}], **fields)  # type: ignore[arg-type]
            written = told["usage"]["input_tokens_details"]["cache_write_tokens"]
        hits.append((cached(told), written))
    (first, written), (second, _), (third, _) = hits
    # Within a boundary of the mark, and not beyond, though all of it was computed twice.
    assert (first, second) == (0, third)
    assert written - 2 * UNIT <= second <= written < 600


def test_a_prewarmed_prompt_is_hit(http: httpx.Client) -> None:
    text = fresh()
    warm = respond(http, text, prompt_cache_options={"prewarm": True})
    usage = warm["usage"]
    assert (warm["status"], warm["output"], usage["output_tokens"]) == ("completed", [], 0)
    assert usage["input_tokens_details"]["cache_write_tokens"] == full(usage["input_tokens"] + 1)
    assert cached(respond(http, text)) == full(usage["input_tokens"])
    told = respond(http, text, 400, prompt_cache_options={"prewarm": True, "mode": "explicit"})
    assert told["error"]["param"] == "prompt_cache_options.prewarm"


def test_a_ttl_holds_and_is_told(http: httpx.Client) -> None:
    mark = {"mode": "explicit", "ttl": "12h"}
    part = {"type": "input_text", "text": fresh(), "prompt_cache_breakpoint": mark}
    content = [part, {"type": "input_text", "text": "Why?"}]
    told = respond(http, [{"role": "user", "content": content}])  # type: ignore[arg-type]
    written = told["usage"]["input_tokens_details"]
    split = written["cache_write_tokens_details"]
    assert split["ttl_12h_tokens"] > 300
    assert sum(split.values()) == written["cache_write_tokens"]
    held = [one for one in http.get("/v1/cache/prefixes").json()["data"] if "expires_in" in one]
    assert any(43_000 < one["expires_in"] <= 43_200 for one in held)
    # The request's own holds the whole prompt, on chats too.
    for send in (respond, chat):
        send(http, fresh(), prompt_cache_options={"ttl": "30m"})
        held = http.get("/v1/cache/prefixes").json()["data"]
        assert any(1_700 < one.get("expires_in", 0) <= 1_800 for one in held)


def test_chats_tell_what_was_written(http: httpx.Client) -> None:
    text = fresh()
    first = chat(http, text)["usage"]
    assert first["prompt_tokens_details"]["cache_write_tokens"] == full(first["prompt_tokens"] + 1)
    again = chat(http, text)["usage"]["prompt_tokens_details"]
    assert again["cache_write_tokens"] == max(
        0, full(first["prompt_tokens"] + 1) - again["cached_tokens"]
    )


# ---- the Messages API ----------------------------------------------------------------------------


def test_messages_name_what_differs_first(http: httpx.Client) -> None:
    text = fresh()
    given = {"system": "You look after a garden. " * 20, "tools": TOOLS}
    first = message(http, text, **given, **ask())
    assert first["diagnostics"] is None
    history = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "And then?"},
    ]
    assert message(http, "", **given, **ask(first), messages=history)["diagnostics"] is None
    edited = [{"role": "user", "content": "Oh! " + text}, *history[1:]]
    cases: list[tuple[str, Json]] = [
        ("system_changed", {**given, "system": "It is late. " + given["system"]}),  # type: ignore[operator]
        ("tools_changed", {**given, "tools": TOOLS[::-1]}),
        ("messages_changed", {**given, "messages": edited}),
    ]
    for reason, fields in cases:
        told = message(http, text, **fields, **ask(first))["diagnostics"]["cache_miss_reason"]
        assert told["type"] == reason
        assert told["cache_missed_input_tokens"] > 300
    thinks = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1030}
    stops = {"stop_sequences": ["e"]}
    told = message(http, text, **given, **thinks, **stops, **ask(first))
    assert told["diagnostics"]["cache_miss_reason"]["type"] == "unavailable"
    unasked = message(http, text, **given)
    for earlier in (unasked, {"id": "msg_nobody"}):
        told = message(http, text, **given, **ask(earlier))["diagnostics"]["cache_miss_reason"]
        assert told["type"] == "previous_message_not_found"


def test_messages_tell_it_in_the_first_event(http: httpx.Client) -> None:
    text = fresh()
    first = message(http, text, system="One.", **ask())
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, "system": "Two."}
    start = sent_events(http, "/v1/messages", {**body, **ask(first)})[0]
    assert start["type"] == "message_start"
    assert start["message"]["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"


@pytest.mark.parametrize("wrong", ["x", {"previous_message_id": 5}, {"previous_message_id": ""}])
def test_malformed_diagnostics_are_named(http: httpx.Client, wrong: Any) -> None:
    told = message(http, "Hello", 400, diagnostics=wrong)
    assert "diagnostics" in told["error"]["message"]


def test_messages_split_what_was_written_by_its_lifetime(http: httpx.Client) -> None:
    for ttl, name in (("1h", "ephemeral_1h_input_tokens"), ("5m", "ephemeral_5m_input_tokens")):
        mark = {"type": "ephemeral", "ttl": ttl}
        block = {"type": "text", "text": fresh(), "cache_control": mark}
        usage = message(http, "", messages=[{"role": "user", "content": [block]}])["usage"]
        assert sum(usage["cache_creation"].values()) == usage["cache_creation_input_tokens"]
        assert usage["cache_creation"][name] > 300


# ---- Claude Code's billing line ------------------------------------------------------------------


def _billing(number: int) -> str:
    return (
        f"x-anthropic-billing-header: cc_version=2.1.175.{number:03x}; cc_entrypoint=cli; "
        f"cch={number:05x};"
    )


@pytest.mark.parametrize("place", ["block", "line", "same line", "chat", "instructions"])
def test_a_billing_line_costs_no_hit(http: httpx.Client, place: str) -> None:
    text, rules = fresh(), "The access code of Mira is 4827. " * 12
    hits = []
    for number in (1, 2):
        line = _billing(number)
        if place == "chat":
            messages = [{"role": "system", "content": f"{line}\n{rules}"}]
            messages.append({"role": "user", "content": text})
            hits.append(cached(chat(http, "", messages=messages)))
        elif place == "instructions":
            hits.append(cached(respond(http, text, instructions=f"{line}\n{rules}")))
        else:
            blocks = {"block": [line, rules], "line": [f"{line}\n{rules}"]}
            texts = blocks.get(place, [f"{line} {rules}"])
            system = [{"type": "text", "text": one} for one in texts]
            hits.append(cached(message(http, text, system=system)))
    assert hits[1] >= 256


def test_a_billing_line_is_not_counted_and_a_users_stays(http: httpx.Client) -> None:
    def count(system: str, said: str) -> int:
        body = {"system": system, "messages": [{"role": "user", "content": said}]}
        return int(http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

    assert count(f"{_billing(1)}\nBe short.", "Hello") == count("Be short.", "Hello")
    assert count("Be short.", f"{_billing(1)}\nHello") > count("Be short.", "Hello") + 10


# ---- leaving nothing behind ----------------------------------------------------------------------


def _complete(http: httpx.Client, text: str, status: int = 200, **fields: Any) -> Json:
    headers = fields.pop("headers", {})
    body = {"prompt": text, "max_tokens": 3, **fields}
    reply = http.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == status, reply.text
    told: Json = reply.json()
    return told


@pytest.mark.parametrize("send", [respond, chat, message, _complete])
def test_who_leaves_nothing_leaves_nothing(http: httpx.Client, send: Any) -> None:
    by_field, by_header = fresh(), fresh()
    send(http, by_field, skip_cache_insert=True)
    send(http, by_header, headers={"Cache-Control": "no-store"})
    for text in (by_field, by_header):
        first = send(http, text)
        assert cached(first) == 0
        # What exists is read.
        again = send(http, text, skip_cache_insert=True)
        usage = again["usage"]
        num_tokens = usage.get("prompt_tokens") or usage.get("input_tokens")
        if "cache_read_input_tokens" in usage:
            num_tokens += cached(again) + usage["cache_creation_input_tokens"]
        assert cached(again) == full(num_tokens)


def test_the_end_of_a_longer_prompt_is_not_left(http: httpx.Client) -> None:
    text = fresh()
    known = _complete(http, text)["usage"]["prompt_tokens"]
    longer = text + STORY
    _complete(http, longer, skip_cache_insert=True)
    assert known - 2 * UNIT < cached(_complete(http, longer)) <= known


def test_who_leaves_nothing_cannot_keep_something(http: httpx.Client) -> None:
    options = {"prompt_cache_options": {"ttl": "30m"}}
    assert respond(http, "Hello " * 40, 400, skip_cache_insert=True, **options)["error"]
    assert respond(http, "Hello", 400, skip_cache_insert=True, store=True)["error"]


# ---- sessions, retention, salts ------------------------------------------------------------------


def test_sessions_are_names_of_1_to_256_characters(http: httpx.Client) -> None:
    text = fresh()
    assert _complete(http, text, session_id="agent-1")["usage"]
    for wrong in (5, "x" * 2_000, ""):
        told = _complete(http, text, 400, session_id=wrong)
        assert told["error"]["param"] == "session_id"
    told = _complete(http, text, 400, headers={"X-Claude-Code-Session-Id": "x" * 257})
    assert told["error"]["param"] == "x-claude-code-session-id"
    user = json.dumps({"session_id": "agent-1"})
    assert message(http, text, metadata={"user_id": user})["usage"]
    ended = http.post("/v1/cache/sessions/agent-1/end").json()
    assert ended["num_checkpoints"] > 0
    # What may go first is there as long as there is room.
    assert cached(_complete(http, text)) > 300
    assert http.post("/v1/cache/sessions/nobody/end").json()["num_checkpoints"] == 0


def test_a_retention_is_one_of_two(http: httpx.Client) -> None:
    for known in ("in_memory", "24h"):
        assert _complete(http, "Hello", prompt_cache_retention=known)["usage"]
    told = _complete(http, "Hello", 400, prompt_cache_retention="1h")
    assert told["error"]["param"] == "prompt_cache_retention"


def test_salts_share_with_their_equals_alone(http: httpx.Client) -> None:
    text = fresh()
    salts = ("one", "two", None, "one")
    sent = [_complete(http, text, **({"cache_salt": s} if s else {})) for s in salts]
    assert [cached(told) for told in sent[:3]] == [0, 0, 0]
    assert cached(sent[3]) == full(sent[3]["usage"]["prompt_tokens"])


def test_every_answer_says_its_cache_status(http: httpx.Client) -> None:
    text = fresh()
    body = {"prompt": text, "max_tokens": 2}
    first, second = (http.post("/v1/completions", json=body) for _ in range(2))
    num_tokens = second.json()["usage"]["prompt_tokens"]
    assert first.headers["cache-status"] == f'vllm; fwd=miss; detail="0 of {num_tokens}"'
    hit = full(num_tokens)
    assert second.headers["cache-status"] == f'vllm; hit; detail="{hit} of {num_tokens}"'
    assert math.isclose(cached(second.json()), hit)


def test_what_was_evicted_is_unavailable_with_its_reason(http: httpx.Client) -> None:
    text = fresh()
    first = compared(http, text, None)
    assert http.post("/reset_prefix_cache").json()["success"]
    told = compared(http, text, first["id"])
    assert told["prompt_cache_diagnostics"]["type"] == "unavailable"
    assert sum(told["prompt_cache_diagnostics"]["miss_tokens"].values()) > 300
