"""``prompt_cache_options`` and ``prompt_cache_diagnostics``."""

from typing import Any

import pytest

from tests.entrypoints.openai.conftest import Served
from tests.entrypoints.openai.responses.test_service import WEATHER, create, events_in, served
from vllm.entrypoints.openai.diagnosis.comparison import Comparison, Difference
from vllm.entrypoints.openai.responses.diagnostics import PromptLookup, diagnose
from vllm.v1.messages import PrefillStats

__all__ = ["served"]
LONG = "The quick brown fox jumps over the lazy dog. " * 12
HEAD = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "Yes."}]
ASKED = {"input": [*HEAD, {"role": "user", "content": "And?"}], "instructions": "Be kind."}


async def answered(served: Served, compared: str | None, **body: Any) -> Any:
    options = {"comparison_response_id": compared}
    return await create(served, **{**ASKED, "prompt_cache_options": options, **body})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"instructions": "Be rude."}, "input_changed"),
        (
            {"input": [{"role": "user", "content": "X" + LONG}, *ASKED["input"][1:]]},
            "input_changed",
        ),
        ({"input": "Summary.", "instructions": "Be kind."}, "context_compacted"),
        ({"tools": [WEATHER]}, "tools_changed"),
        ({"reasoning": {"effort": "high"}}, "reasoning_effort_changed"),
        ({"model": "alias"}, "model_changed"),
    ],
)
async def test_what_differs_first_is_the_reason(
    served: Served, change: dict[str, Any], reason: str
) -> None:
    first = await answered(served, None)
    assert first.prompt_cache_diagnostics is None
    told = (await answered(served, first.id, **change)).prompt_cache_diagnostics
    assert (told.type, told.reason) == ("cache_miss", reason)
    num_old, num_new = (len(job[0]) for job in served.engine.jobs)
    unit = served.context.config.cache_config.block_size
    assert told.comparison_reusable_tokens == (num_old - 1) // unit * unit
    assert num_new - unit < told.cache_missed_tokens <= num_new


async def test_what_was_read_from_the_cache_is_a_hit_whatever_differs(served: Served) -> None:
    first = await answered(served, None)
    served.engine.num_cached_tokens = len(served.engine.jobs[0][0])
    told = (await answered(served, first.id, reasoning={"effort": "high"})).prompt_cache_diagnostics
    assert told.type == "cache_hit"
    body = {"input": "More?", "previous_response_id": first.id}
    assert (await answered(served, first.id, **body)).prompt_cache_diagnostics.type == "cache_hit"


async def test_nothing_differs_and_yet_it_missed(served: Served) -> None:
    first = await answered(served, None)
    second = await answered(served, first.id)
    assert second.prompt_cache_diagnostics.type == "unavailable"


async def test_unknown_deleted_and_another_salts_responses_are_not_found(served: Served) -> None:
    first = await answered(served, None)
    found = [await answered(served, "resp_1")]
    found.append(await answered(served, first.id, cache_salt="other"))
    await served.client.delete(f"/v1/responses/{first.id}")
    found.append(await answered(served, first.id))
    kinds = {response.prompt_cache_diagnostics.type for response in found}
    assert kinds == {"comparison_response_not_found"}


async def test_a_response_that_is_not_stored_is_remembered_if_it_asks(served: Served) -> None:
    silent = await create(served, **ASKED, store=False)
    asks = await answered(served, None, store=False)
    served.engine.num_cached_tokens = 10_000
    kinds = [
        (await answered(served, one.id)).prompt_cache_diagnostics.type for one in (silent, asks)
    ]
    assert kinds == ["comparison_response_not_found", "cache_hit"]


async def test_a_stream_and_a_later_read_tell_the_same(served: Served) -> None:
    first = await answered(served, None)
    options = {"comparison_response_id": first.id, "ttl": "12h"}
    body = {**ASKED, "instructions": "Be rude.", "prompt_cache_options": options, "stream": True}
    last = events_in(await served.client.post("/v1/responses", json=body))[-1].response
    assert last.prompt_cache_diagnostics.reason == "input_changed"
    assert last.prompt_cache_options.to_dict() == {"mode": "implicit", **options}
    read = (await served.client.get(f"/v1/responses/{last.id}")).json()
    assert read["prompt_cache_diagnostics"] == last.prompt_cache_diagnostics.to_dict()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"ttl": "99h"}, "ttl"),
        ({"ttl": 30}, "ttl"),
        ({"mode": "never"}, "mode"),
        ({"comparison_response_id": 5}, "comparison_response_id"),
        ({"comparison_response_id": ""}, "comparison_response_id"),
        ({"prewarm": "yes"}, "prewarm"),
    ],
)
async def test_wrong_options_are_refused_by_name(
    served: Served, options: dict[str, Any], field: str
) -> None:
    body = {"input": "hi", "prompt_cache_options": options}
    answer = await served.client.post("/v1/responses", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"prompt_cache_options.{field}"


async def test_details_and_the_header_say_what_missed(serve: Any) -> None:
    served = serve(served_model={"max_model_len": 2048}, enable_prompt_tokens_details=True)
    first = await answered(served, None)
    n = len(served.engine.jobs[0][0])
    served.engine.num_cached_tokens = 16
    served.engine.prefill_stats = PrefillStats(n, 16, 32, {"evicted": n - 16})
    body = {**ASKED, "instructions": "Be rude."}
    options = {"comparison_response_id": first.id}
    reply = await served.client.post(
        "/v1/responses", json={**body, "prompt_cache_options": options}
    )
    told = reply.json()
    num_input = told["usage"]["input_tokens"]
    assert reply.headers["cache-status"] == f'vllm; hit; detail="16 of {num_input}"'
    assert told["prompt_cache_diagnostics"]["miss_tokens"] == {"evicted": n - 16}
    first_difference = told["prompt_cache_diagnostics"]["first_difference"]
    assert (first_difference["component"], first_difference["message_index"]) == ("system", None)
    assert told["usage"]["input_tokens_details"]["miss_tokens"] == {"evicted": n - 16}
    assert told["usage"]["input_tokens_details"]["dense_match_tokens"] == 32
    counted = served.app.state.registry.get_sample_value(
        "vllm:cache_diagnoses_total", {"api": "responses", "answer": "cache_miss"}
    )
    assert counted == 1


@pytest.mark.parametrize(
    ("found", "num_cached", "told"),
    [
        (Comparison(64, 64, 64, None), 32, "cache_hit"),
        (Comparison(64, 64, 64, None), 0, "unavailable"),
        (Comparison(10, 64, 64, Difference("system", 10)), 0, "cache_miss"),
        (Comparison(40, 64, 64, Difference("messages", 40, 0)), 32, "cache_hit"),
        (Comparison(20, 25, 25, Difference("messages", 20, 0)), 0, "cache_miss"),
        (Comparison(25, 25, 30, None), 0, "cache_hit"),
        (Comparison(95, 96, 200, Difference("text_format", 95)), 64, "cache_hit"),
        (Comparison(95, 96, 200, Difference("text_format", 95)), 32, "unavailable"),
    ],
)
def test_a_hit_reaches_the_last_unit_that_both_have_room_for(
    found: Comparison, num_cached: int, told: str
) -> None:
    assert diagnose(found, PromptLookup(num_cached, 32, 1)).__struct_config__.tag == told


def test_another_key_on_several_cores_is_a_reason() -> None:
    found = Comparison(64, 64, 64, None, has_other_key=True)
    kinds = [diagnose(found, PromptLookup(0, 32, cores)).__struct_config__.tag for cores in (1, 2)]
    assert kinds == ["unavailable", "cache_miss"]
    assert diagnose(found, PromptLookup(0, None, 1)).__struct_config__.tag == "unavailable"


async def test_explicit_without_marks_neither_reads_nor_writes(served: Served) -> None:
    body = {**ASKED, "prompt_cache_options": {"mode": "explicit"}}
    reply = await served.client.post("/v1/responses", json=body)
    assert "x-ignored-fields" not in reply.headers
    told = reply.json()
    assert told["prompt_cache_options"]["mode"] == "explicit"
    assert told["usage"]["input_tokens_details"]["cache_write_tokens"] == 0
    assert served.engine.options[-1].skip_cache_insert is True
    assert served.engine.jobs[-1][1].skip_reading_prefix_cache is True
    # It is remembered all the same, and the next one uses the cache again.
    assert (await answered(served, told["id"])).prompt_cache_diagnostics.type == "unavailable"
    assert served.engine.options[-1].skip_cache_insert is False


async def test_what_was_written_is_told_by_its_lifetime(served: Served) -> None:
    mark = {"mode": "explicit", "ttl": "12h"}
    parts = [{"type": "input_text", "text": LONG, "prompt_cache_breakpoint": mark}]
    parts.append({"type": "input_text", "text": LONG})
    body = {"input": [{"role": "user", "content": parts}]}
    options = {"mode": "explicit"}
    reply = await served.client.post(
        "/v1/responses", json={**body, "prompt_cache_options": options}
    )
    assert "x-ignored-fields" not in reply.headers
    (place,) = served.engine.options[-1].cache_ttls
    assert served.engine.options[-1].cache_insert_end == place
    written = reply.json()["usage"]["input_tokens_details"]["cache_write_tokens"]
    unit = served.context.config.cache_config.block_size
    assert written == place // unit * unit
    response = await create(served, **body)
    details = response.usage.input_tokens_details
    written = details.cache_write_tokens_details
    assert written.ttl_12h_tokens + written.ttl_30m_tokens == details.cache_write_tokens
    (place,) = served.engine.options[-1].cache_ttls
    assert written.ttl_12h_tokens == place > 100
    assert written.ttl_30m_tokens > 50
