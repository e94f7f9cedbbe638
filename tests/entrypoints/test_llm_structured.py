"""Answers that must follow a schema follow it, whatever the model would rather say."""

import json
import random
from typing import Any

import jsonschema
import pytest

from vllm import LLM, SamplingParams
from vllm.exceptions import UserInputError
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.slow

NUM_SCHEMAS = 24


@pytest.fixture(scope="module")
def llm():
    """The embedded model in this process, with drafts that it looks up in its own text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with LLM(
            "deepseek-v4",
            block_size=32,
            max_model_len=1024,
            kv_cache_memory_bytes=1 << 26,
            use_tqdm_on_load=False,
            speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        ) as made:
            yield made


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose every value is short."""
    kinds = ["string", "integer", "number", "enum", "const", "boolean", "null", "pattern", "anyOf"]
    kind = rng.choice(kinds + ["object", "object", "array"] * depth)
    low = rng.randrange(-50, 50)
    made: dict[str, Any] = {
        "string": {"type": "string", "minLength": rng.randrange(3), "maxLength": 6},
        "integer": {"type": "integer", "minimum": low, "exclusiveMaximum": low + 30},
        "number": {"enum": [0.5, -1e3, low]},
        "enum": {"enum": ["red", 3, None, [1], {"a": 'q"\\'}]},
        "const": {"const": {"k": [low, "é"]}},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "pattern": {"type": "string", "pattern": "^[a-c]{2,4}-\\d$"},
        "object": {},
        "array": {},
        "anyOf": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
    }[kind]
    if kind == "array":
        items = random_schema(rng, depth - 1)
        made = {"type": "array", "items": items, "minItems": rng.randrange(2), "maxItems": 3}
    if kind == "object":
        names = rng.sample(["a", "b b", "ç", "d\n", "e"], rng.randrange(1, 4))
        made = {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randrange(len(names) + 1)),
            "additionalProperties": False,
        }
    return made


def test_random_schemas(llm: LLM) -> None:
    rng = random.Random(8)
    schemas = [random_schema(rng) for _ in range(NUM_SCHEMAS)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 1.0, 1.8]),
            seed=i,
            max_tokens=600,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        for i, schema in enumerate(schemas)
    ]
    outputs = llm.generate(["Say it in JSON: "] * NUM_SCHEMAS, params, use_tqdm=False)
    for schema, output in zip(schemas, outputs, strict=True):
        (answer,) = output.outputs
        assert answer.finish_reason == "stop", (schema, answer.text)
        jsonschema.validate(json.loads(answer.text), schema)


def test_several_answers_to_one_prompt_each_follow_the_grammar(llm: LLM) -> None:
    choices = ["left", "right", "up", "down"]
    params = SamplingParams(
        n=4, seed=1, temperature=2.0, structured_outputs=StructuredOutputsParams(choice=choices)
    )
    (output,) = llm.generate("Go ", params, use_tqdm=False)
    assert {answer.text for answer in output.outputs} <= set(choices)


def test_a_bad_grammar_is_refused_and_the_others_go_on(llm: LLM) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "thing"}))
    with pytest.raises(UserInputError, match="thing"):
        llm.generate("x", bad, use_tqdm=False)
    good = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"))
    (output,) = llm.generate("x", good, use_tqdm=False)
    assert output.outputs[0].text.isdigit()


def test_a_prompt_can_be_cut(llm: LLM) -> None:
    tokens = list(range(10, 110))
    params = SamplingParams(max_tokens=2, truncate_prompt_tokens=30)
    (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    assert output.prompt_token_ids == tokens[-30:]


def test_a_bad_word_is_not_said(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    prompt = "The garden is quiet. It rained all day."
    said = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    word = tokenizer.decode(said[0].outputs[0].token_ids[1:3])
    params = SamplingParams(temperature=0.0, max_tokens=12, bad_words=[word])
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    found = list(output.outputs[0].token_ids)
    for text in (word, word.lstrip(), f" {word.lstrip()}"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids not in [found[i : i + len(ids)] for i in range(len(found))]


CONTRADICTIONS = [
    # Found only when the model has begun the object.
    *(
        {
            "type": "object",
            "properties": {"score": {"type": "integer"}},
            "patternProperties": {pattern: {"minimum": 5}},
            "additionalProperties": False,
            "required": ["score"],
        }
        for pattern in ("^score$", "^(score)$", "^sc(o)re$")
    ),
    {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/inner"}},
        "required": ["a"],
        "$defs": {
            "inner": {
                "type": "object",
                "properties": {"s": {"type": "integer"}},
                "patternProperties": {"^s$": {"type": "string"}},
                "additionalProperties": False,
                "required": ["s"],
            }
        },
    },
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
]


@pytest.mark.parametrize("schema", CONTRADICTIONS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_that_rules_itself_out_is_its_authors_fault(
    llm: LLM, schema: dict[str, Any], temperature: float
) -> None:
    asked = StructuredOutputsParams(json=schema)
    params = SamplingParams(
        max_tokens=60, temperature=temperature, seed=3, structured_outputs=asked
    )
    # Each of these must come to the place that nothing matches.
    with pytest.raises(UserInputError, match=r"structured_outputs\.json") as error:
        llm.generate("Give me a score:", params, use_tqdm=False)
    assert error.value.param == "structured_outputs"
    # Others are served as before.
    good = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(choice=["Yes"]))
    assert llm.generate("x", good, use_tqdm=False)[0].outputs[0].text == "Yes"
