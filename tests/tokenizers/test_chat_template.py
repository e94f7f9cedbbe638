import pytest

from tests.tokenizers.family_tokenizers import FAMILIES
from vllm.exceptions import ConfigError, UserInputError
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import ChatOptions, Tokenizer
from vllm.tokenizers.chat_template import JinjaChatEncoder
from vllm.tokenizers.template_files import read_template

CHATML = """{{ bos_token }}{% for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('late system') }}{% endif %}
<|im_start|>{{ m['role'] }}
{{ m.content | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
HI = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)


def text(tokenizer, template, messages=(HI,), **options) -> str:
    encoder = JinjaChatEncoder(tokenizer, template)
    return encoder.encode_chat(list(messages), ChatOptions(**options)).text


def test_chatml(tokenizer):
    messages = [{"role": "system", "content": [{"type": "text", "text": "S"}]}, HI]
    rendered = text(tokenizer, CHATML, messages)
    assert rendered == (
        f"{tokenizer.bos_token}<|im_start|>system\nS<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not text(tokenizer, CHATML, add_generation_prompt=False).endswith("assistant\n")


@pytest.mark.slow
@pytest.mark.parametrize("generate", [True, False])
def test_equal_to_transformers(tokenizer, generate):
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, bos_token="<s>")
    messages = [
        {"role": "system", "content": " é <b> "},
        HI,
        {"role": "assistant", "content": "x\ny"},
        HI,
    ]
    template = CHATML.replace("bos_token", "'<s>'") + "{{ messages | tojson(indent=2) }}"
    expected = reference.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=generate
    )
    assert text(tokenizer, template, messages, add_generation_prompt=generate) == expected


def test_tokens_have_one_bos(tokenizer):
    prompt = JinjaChatEncoder(tokenizer, CHATML).encode_chat([HI], ChatOptions())
    assert prompt.token_ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_continued_final_message_is_cut_after_its_content(tokenizer):
    messages = [HI, {"role": "assistant", "content": "Hello, I "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert text(tokenizer, CHATML, messages, **options).endswith("assistant\nHello, I")
    with pytest.raises(UserInputError, match="does not show the last message"):
        text(tokenizer, "nothing", messages, **options)


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% generation %}x{{ messages | length }}{% endgeneration %}", "x1"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none }}{{ undefined_name is defined }}", "TrueFalse"),
        ("a  {# comment #}\n  {% if true %}\nb{% endif %}", "a  b"),
    ],
)
def test_dialect(tokenizer, template, rendered):
    messages = [{"role": "user", "content": "<é>"}]
    assert text(tokenizer, template, messages) == rendered


def test_template_arguments(tokenizer):
    template = "{{ custom }}{{ enable_thinking }}{{ reasoning_effort }}"
    kwargs = {"custom": 7}
    assert text(tokenizer, template, template_kwargs=kwargs) == "7"
    assert text(tokenizer, template, template_kwargs=kwargs, reasoning_effort="none") == (
        "7Falsenone"
    )
    with pytest.raises(UserInputError, match="may not set messages"):
        text(tokenizer, template, template_kwargs={"messages": []})


def test_reasoning_is_offered_under_both_names(tokenizer):
    template = "{{ messages[0].reasoning }}|{{ messages[0].reasoning_content }}"
    message = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    assert text(tokenizer, template, [message]) == "r|r"


def test_open_think_mark_means_reasoning(tokenizer):
    for template, expected in (("<think>\n", True), ("<think></think>", False)):
        prompt = JinjaChatEncoder(tokenizer, template).encode_chat([HI], ChatOptions())
        assert prompt.in_reasoning is expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no such role') }}",
        "{{ 1 / 0 }}",
        "{{ messages[5].role.x }}",
        "{{ messages + 3 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(1000000000) }}",
    ],
)
def test_templates_that_fail_or_reach_out(tokenizer, template):
    with pytest.raises(UserInputError, match="chat template"):
        text(tokenizer, template)


@pytest.mark.parametrize("template", ["{% if %}", "{{ x", "{% nope %}"])
def test_templates_that_do_not_compile(tokenizer, template):
    with pytest.raises(ConfigError, match="not valid Jinja"):
        JinjaChatEncoder(tokenizer, template)


def test_read_template(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("T")
    assert read_template(str(file)) == "T"
    assert read_template("{{ x }}") == "{{ x }}"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_template(str(tmp_path / "none.jinja"))


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("generate", [True, False])
def test_tokens_are_those_of_transformers(family, generate, tmp_path):
    from transformers import PreTrainedTokenizerFast

    ours = FAMILIES[family]()
    reference = PreTrainedTokenizerFast(
        tokenizer_object=ours.backend, chat_template=ours.chat_template, **ours.template_tokens
    )
    reference.save_pretrained(tmp_path)
    saved = Tokenizer.from_folder(tmp_path)
    messages = [
        HI,
        {"role": "assistant", "content": " x\ny "},
        {"role": "user", "content": "a <b>"},
    ]
    options = ChatOptions(add_generation_prompt=generate)
    prompt = JinjaChatEncoder(saved, saved.chat_template).encode_chat(messages, options)
    arguments = {"add_generation_prompt": generate}
    assert prompt.text == reference.apply_chat_template(messages, tokenize=False, **arguments)
    expected = reference.apply_chat_template(messages, return_dict=False, **arguments)
    assert prompt.token_ids == expected
    assert saved.encode("so it is") == reference("so it is")["input_ids"]
