import pytest

from tests.v1.metrics.values import values_of
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.entrypoints.llm import _as_chats, _as_prompts
from vllm.exceptions import PoolTooSmallError, UserInputError
from vllm.v1.metrics.reader import Histogram


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2]], [[1], [2]]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ([{"prompt": "a"}], [{"prompt": "a"}]),
        ([], []),
    ],
)
def test_one_prompt_is_told_from_several(given, expected):
    assert _as_prompts(given) == expected


def test_one_chat_is_told_from_several():
    chat = [{"role": "user", "content": "hi"}]
    assert list(_as_chats(chat)) == [chat]
    assert list(_as_chats([chat, chat])) == [chat, chat]


@pytest.fixture(scope="module")
def llm():
    """The embedded model in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with LLM(
            "deepseek-v4",
            block_size=32,
            max_model_len=1024,
            kv_cache_memory_bytes=1 << 26,
            use_tqdm_on_load=False,
        ) as made:
            yield made


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
pytestmark = pytest.mark.slow


def test_prompts_are_answered_in_order(llm):
    tokens = llm.get_tokenizer().encode("second")
    outputs = llm.generate(
        ["first", TokensPrompt(prompt_token_ids=tokens), "a third one"], GREEDY, use_tqdm=False
    )
    assert [o.prompt for o in outputs] == ["first", None, "a third one"]
    assert outputs[1].prompt_token_ids == tokens
    assert all(len(o.outputs[0].token_ids) == 6 for o in outputs)
    assert all(o.finished for o in outputs)


def test_a_cached_prompt_gives_the_same_answer(llm):
    prompt = "The quick brown fox jumps over the lazy dog. " * 12
    llm.reset_prefix_cache()
    (first,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    (second,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens > 0
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert llm.reset_prefix_cache()


def test_seeds_make_answers_repeatable(llm):
    params = SamplingParams(n=2, seed=3, max_tokens=5, ignore_eos=True)
    first, second = (llm.generate("hello", params, use_tqdm=False)[0] for _ in range(2))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert first.outputs[0].token_ids != first.outputs[1].token_ids


def test_each_prompt_may_have_its_own_parameters(llm):
    lengths = [3, 5]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    with pytest.raises(UserInputError, match="2 prompts but 1 sampling_params"):
        llm.generate(["a", "b"], params[:1])
    with pytest.raises(UserInputError, match="1 values for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[1])


def test_parameters_that_are_none_are_refused(llm):
    for given in ({"temperature": 0}, [{"temperature": 0}], 5):
        with pytest.raises(UserInputError, match="must be a SamplingParams"):
            llm.generate("a", given, use_tqdm=False)


def test_a_wrong_prompt_leaves_nothing_behind(llm):
    with pytest.raises(UserInputError, match="empty"):
        llm.generate(["fine", ""], GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate("fine", GREEDY, use_tqdm=False)) == 1


@pytest.mark.parametrize("prompts", [5, None, b"ab"])
def test_what_is_no_prompt_at_all(prompts):
    with pytest.raises(UserInputError, match="neither a text"):
        _as_prompts(prompts)


def test_the_most_urgent_request_is_answered_first(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with LLM(
        "deepseek-v4",
        max_model_len=128,
        kv_cache_memory_bytes=1 << 24,
        max_num_seqs=1,
        scheduling_policy="priority",
        use_tqdm_on_load=False,
    ) as made:
        engine = made.llm_engine
        for request_id, priority in (("late", 5), ("mid", 0), ("mid too", 0), ("first", -3)):
            engine.add_request(request_id, [7, 8, 9], GREEDY, priority=priority)
        finished = []
        while engine.has_unfinished_requests():
            finished += [output.request_id for output in engine.step() if output.finished]
        assert finished == ["first", "mid", "mid too", "late"]


def test_a_chat_is_rendered_in_the_models_format(llm):
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    assert "hi" in output.prompt
    assert output.prompt.startswith(llm.get_tokenizer().bos_token)
    assert len(output.outputs[0].token_ids) == 6


def test_prompts_that_are_scored_hit_what_was_scored(llm):
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    shared = list(range(300, 500))
    prompts = [[*shared, *range(600, 600 + extra)] for extra in (3, 40, 41)]

    def score(chosen):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in chosen], params)
        told = [(output.prompt_logprobs, output.outputs[0].token_ids) for output in outputs]
        return told, [output.num_cached_tokens for output in outputs]

    alone = []
    for prompt in prompts:
        assert llm.reset_prefix_cache()
        told, hits = score([prompt])
        assert hits == [0]
        alone += told
    assert llm.reset_prefix_cache()
    told, hits = score(prompts)
    assert told == alone
    # The first is computed while the others wait for it. What they share is known up to 192, so
    # that they may resume at 160, or at the last place before it that has its windows.
    assert hits[0] == 0
    assert min(hits[1:]) >= 128
    told, hits = score(prompts)
    assert told == alone
    assert min(hits) >= 128


def test_prompt_logprobs_cover_the_prompt(llm):
    params = SamplingParams(max_tokens=2, prompt_logprobs=2, logprobs=1, ignore_eos=True)
    (output,) = llm.generate("some words here", params, use_tqdm=False)
    ids = output.prompt_token_ids
    assert output.prompt_logprobs[0] is None
    assert [next(iter(p)) for p in output.prompt_logprobs[1:]] == ids[1:]
    assert all(len(p) in (2, 3) for p in output.prompt_logprobs[1:])
    assert len(output.outputs[0].logprobs) == 2
    assert output.outputs[0].cumulative_logprob < 0


def test_a_chat_with_tools_and_a_template_of_its_own(llm):
    chat = [{"role": "user", "content": "Weather in Oslo?"}]
    function = {"name": "get_weather", "description": "Tells the weather.", "parameters": {}}
    tools = [{"type": "function", "function": function}]
    (plain,) = llm.chat(chat, GREEDY, use_tqdm=False)
    (with_tools,) = llm.chat(chat, GREEDY, use_tqdm=False, tools=tools)
    assert "get_weather" in with_tools.prompt
    assert "get_weather" not in plain.prompt
    template = "{{ messages[0].content }}!"
    (own,) = llm.chat(chat, GREEDY, use_tqdm=False, chat_template=template)
    assert own.prompt == "Weather in Oslo?!"


def test_defaults_and_metrics(llm):
    assert isinstance(llm.get_default_sampling_params(), SamplingParams)
    before = values_of(llm.get_metrics())["vllm:generation_tokens"]
    llm.generate("x", GREEDY, use_tqdm=False)
    after = llm.get_metrics()
    assert values_of(after)["vllm:generation_tokens"] == before + 6
    (tokens,) = [m for m in after if m.name == "vllm:request_generation_tokens"]
    assert isinstance(tokens, Histogram)
    assert tokens.count >= 1
    assert tokens.buckets["+Inf"] == tokens.count


def test_a_pool_that_is_too_small_is_told_with_a_way_out():
    with pytest.raises(PoolTooSmallError, match="lower max_model_len, or raise"):
        LLM("deepseek-v4", kv_cache_memory_bytes=1_000_000, use_tqdm_on_load=False)
    # No length fits: to lower it is no way out.
    with pytest.raises(PoolTooSmallError, match=r"are available\. Raise .*kv_cache_memory_bytes"):
        LLM("deepseek-v4", kv_cache_memory_bytes=10_000, use_tqdm_on_load=False)


def test_the_tokenizer_renders_chats(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    chat = [{"role": "user", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    (output,) = llm.chat(chat, SamplingParams(max_tokens=1))
    assert (output.prompt_token_ids, output.prompt) == (ids, text)
    own = tokenizer.apply_chat_template(
        chat, chat_template="{{ messages[0].content }}!", tokenize=False
    )
    assert own == "Hello!"
