from typing import get_args, get_type_hints

import pytest

from tests.v1.engine.fakes import make_tokenizer
from vllm.exceptions import UserInputError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.wire import AddRequests, Codec
from vllm.v1.request_options import RequestOptions
from vllm.v1.structured_output.limits import read_schema

TOKENIZER = make_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size


@pytest.fixture
def processor(config):
    return InputProcessor(config(), TOKENIZER)


def process(processor, prompt="hello", request_params=None, **kwargs):
    params = request_params or SamplingParams()
    options = RequestOptions(**kwargs)
    return processor.process("r", processor.parse_prompt(prompt), params, options)


@pytest.mark.parametrize(
    ("prompt", "ids", "text"),
    [
        ("hello", TOKENIZER.encode("hello"), "hello"),
        ([1, 2], [1, 2], None),
        ({"prompt": "hello"}, TOKENIZER.encode("hello"), "hello"),
        ({"prompt_token_ids": [1, 2]}, [1, 2], None),
        ({"prompt_token_ids": [1, 2], "prompt": "shown"}, [1, 2], "shown"),
    ],
)
def test_every_form_of_a_prompt(processor, prompt, ids, text):
    parsed = processor.parse_prompt(prompt)
    assert (parsed.token_ids, parsed.text) == (ids, text)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ("", "empty"),
        ([], "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({}, "neither prompt nor prompt_token_ids"),
        ({"prompt": 3}, "must be a text, not int"),
        (5, "not int"),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}},
            r"prompt\.multi_modal_data is not supp",
        ),
        ([1, "a"], "whole numbers"),
        ([1.0], "whole numbers"),
        ([True], "whole numbers"),
        ([0, VOCAB_SIZE], f"token id {VOCAB_SIZE}, which is out of the vocabulary"),
        ([0, -1], "token id -1"),
        ("a\ud800", "valid Unicode"),
    ],
)
def test_bad_prompts_are_refused(processor, prompt, match):
    with pytest.raises(UserInputError, match=match):
        process(processor, prompt)


def test_a_prompt_must_leave_room_for_a_token(processor):
    assert len(process(processor, [1] * 255).prompt_token_ids) == 255
    with pytest.raises(
        UserInputError, match=r"maximum context length is 256 tokens.*\(256 in the prompt"
    ) as error:
        process(processor, [1] * 256)
    assert error.value.param == "input_tokens"


def test_max_tokens_is_the_rest_of_the_context_at_most(processor):
    def max_tokens(wanted):
        return process(
            processor, [1] * 200, SamplingParams(max_tokens=wanted)
        ).sampling_params.max_tokens

    assert [max_tokens(w) for w in (None, 256, 56, 5)] == [56, 56, 56, 5]


@pytest.mark.parametrize(
    ("params", "param", "match"),
    [
        (SamplingParams(max_tokens=257), "max_tokens", "max_tokens=257.*256"),
        (SamplingParams(max_tokens=None, min_tokens=300), "min_tokens", "min_tokens=300"),
        (SamplingParams(logprobs=21), "logprobs", "at most 20"),
        (SamplingParams(logprobs=-1), "logprobs", f"asks for {VOCAB_SIZE}"),
        (SamplingParams(prompt_logprobs=21), "prompt_logprobs", "at most 20"),
        (SamplingParams(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids", "out of the vocabulary"),
        (SamplingParams(stop="x", detokenize=False), "stop", "stop_token_ids"),
    ],
)
def test_bad_parameters_name_their_field(processor, params, param, match):
    with pytest.raises(UserInputError, match=match) as error:
        process(processor, request_params=params)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "a"), ("seed", "a"), ("stop", 5), ("max_tokens", 1.5), ("logprobs", True)],
)
def test_parameters_of_the_wrong_type_name_their_field(processor, name, value):
    with pytest.raises(UserInputError, match=f"^{name}: Expected") as error:
        process(processor, request_params=SamplingParams(**{name: value}))
    assert error.value.param == name


def test_all_logprobs_need_an_open_limit(config):
    vllm_config = config()
    vllm_config.model_config.max_logprobs = -1
    processor = InputProcessor(vllm_config, TOKENIZER)
    assert process(processor, request_params=SamplingParams(logprobs=-1)).sampling_params


def test_end_ids_come_from_tokenizer_and_generation_config(config):
    eos = TOKENIZER.eos_token_id
    processor = InputProcessor(config(generation_config={"eos_token_id": [eos, 5]}), TOKENIZER)
    given = SamplingParams(stop_token_ids=[9])
    params = process(processor, request_params=given).sampling_params
    assert (params.eos_token_id, params.stop_token_ids) == (eos, [9, 5])
    assert (given.eos_token_id, given.stop_token_ids) == (None, [9])  # the caller's is untouched
    ignoring = process(processor, request_params=SamplingParams(ignore_eos=True)).sampling_params
    assert (ignoring.eos_token_id, ignoring.stop_token_ids) == (None, [])


def test_without_a_tokenizer_only_ids_are_taken(config):
    vllm_config = config()
    vllm_config.model_config.hf_config["eos_token_id"] = [4, 5]
    processor = InputProcessor(vllm_config, None)
    assert process(processor, [1]).sampling_params.eos_token_id == 4
    for prompt in ("hello", {"prompt": "hello"}):
        with pytest.raises(UserInputError, match="skip_tokenizer_init"):
            process(processor, prompt)
    with pytest.raises(UserInputError, match="stop_token_ids"):
        process(processor, [1], SamplingParams(stop="x"))


@pytest.mark.parametrize("salt", ["", "x" * 129, "a/b", "a@b", "a\\b", "a\0b", 5])
def test_bad_salts_are_refused(processor, salt):
    with pytest.raises(UserInputError) as error:
        process(processor, cache_salt=salt)
    assert error.value.param == "cache_salt"


def test_a_salt_comes_from_the_call_or_the_prompt(processor):
    assert process(processor, cache_salt="s").options.cache_salt == "s"
    assert process(processor, {"prompt": "hello", "cache_salt": "p"}).options.cache_salt == "p"


def test_priority_needs_its_policy(processor, config):
    with pytest.raises(UserInputError, match="--scheduling-policy priority"):
        process(processor, priority=1)
    made = process(InputProcessor(config(policy="priority"), TOKENIZER), priority=1)
    assert made.options.priority == 1


def test_sampling_defaults_of_the_checkpoint(config):
    generation = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 7, "top_k": None}
    processor = InputProcessor(config(generation_config=generation), TOKENIZER)
    assert processor.get_default_sampling_params() == {
        "temperature": 0.6,
        "top_p": 0.95,
        "max_tokens": 7,
    }


def test_boundaries_worth_a_checkpoint_travel_with_the_prompt(processor):
    request = process(processor, {"prompt_token_ids": [1, 2, 3], "cache_boundaries": [2, 3]})
    assert request.options.cache_boundaries == [2, 3]
    assert process(processor).options.cache_boundaries == []


@pytest.mark.parametrize("boundaries", [[0], [4], [-1], [True], ["1"], [1] * 17])
def test_boundaries_outside_the_prompt_and_too_many_are_refused(processor, boundaries):
    with pytest.raises(UserInputError) as error:
        process(processor, {"prompt_token_ids": [1, 2, 3], "cache_boundaries": boundaries})
    assert error.value.param == "cache_boundaries"


_NUMBERS = [
    name for name, kind in get_type_hints(SamplingParams).items() if int in (kind, *get_args(kind))
]


@pytest.mark.parametrize(
    "number",
    [2**63 - 1, 2**64, -(2**63) - 1, 10**400],
    ids=["2**63 - 1", "2**64", "-(2**63) - 1", "10**400"],
)
@pytest.mark.parametrize("name", _NUMBERS)
def test_a_number_is_refused_or_fits_a_message(processor, name, number):
    refused = None
    try:
        made = process(processor, request_params=SamplingParams(**{name: number}))
        Codec().encode(AddRequests([made]))
    except UserInputError as error:
        refused = error.param
    assert refused in (None, name)


def test_a_schema_holds_numbers_of_any_size(processor):
    schema = {"type": "integer", "minimum": 10**30, "enum": [-(2**80)]}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    made = process(processor, request_params=params)
    sent = Codec().decode_to_core(Codec().encode(AddRequests([made])))
    assert read_schema(sent.requests[0].sampling_params.structured_outputs.json) == schema
    assert params.structured_outputs.json == schema


def test_a_cache_key_is_the_same_number_in_every_process(processor):
    made = [process(processor, prompt_cache_key=key) for key in ("a", "b", "a", None)]
    assert [request.options.routing_key for request in made[::2]] == [3405396810240292928] * 2
    assert made[1].options.routing_key != made[0].options.routing_key
    assert made[3].options.routing_key is None
    sent = Codec().decode_to_core(Codec().encode(AddRequests([made[0]])))
    assert sent.requests == made[:1]
