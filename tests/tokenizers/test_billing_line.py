import pytest

from tests.tokenizers.family_tokenizers import byte_level
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import ChatOptions, Tokenizer, make_chat_encoder
from vllm.tokenizers.billing_line import strip_billing_line

LINE = "x-anthropic-billing-header: cc_version=2.1.332.1ab; cc_entrypoint=cli; cch=a1b2c;"
HI = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (LINE, ""),
        (LINE + "\n", ""),
        (LINE + "\nYou are Claude.", "You are Claude."),
        (LINE + "\r\nYou are Claude.", "You are Claude."),
        (LINE + "\n\nYou are Claude.", "\nYou are Claude."),
        (LINE + "You are Claude; be brief.", "You are Claude; be brief."),
        (LINE + " You are Claude.", " You are Claude."),
        (LINE + "  \nYou are Claude.", "You are Claude."),
        (LINE.replace("; ", ";") + "\nx", "x"),
        (LINE.replace(" cch=a1b2c;", "") + "\nx", "x"),
        (LINE[:-1] + "\nx", "x"),
        (LINE + " cc_workload=cron;\nx", "x"),
        (LINE.replace("cli", "sdk-ts") + "\nx", "x"),
        (LINE.replace("cch=a1b2c", "cch=") + "\nx", "x"),
        (LINE + "\n" + LINE + "\nx", LINE + "\nx"),
        ("X-Anthropic-Billing-Header: cc_version=3;\nx", "x"),
        # Not at the very beginning, or another text.
        (" " + LINE, " " + LINE),
        ("Keep:\n" + LINE, "Keep:\n" + LINE),
        ("x-anthropic-billing: a=b;\nx", "x-anthropic-billing: a=b;\nx"),
        ("", ""),
    ],
)
def test_the_line_goes_and_the_rest_stays(text: str, left: str) -> None:
    assert strip_billing_line(text) == left


def encoders(**options: bool):
    own = Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)
    return [
        make_chat_encoder({"model_type": "deepseek_v4"}, own, **options),
        make_chat_encoder({}, byte_level(), **options),
    ]


def varied(line: str) -> list[list[dict[str, object]]]:
    """The places in which a line may stand, each before the same text."""
    return [
        [{"role": "system", "content": line + "\nBe brief."}, HI],
        [{"role": "developer", "content": line + "\nBe brief."}, HI],
        [{"role": "system", "content": [{"type": "text", "text": line + "\nBe brief."}]}, HI],
        [{"role": "system", "content": parts(line, "Be brief.")}, HI],
        [{"role": "system", "content": parts(line + "\n", "Be brief.")}, HI],
        [{"role": "system", "content": parts("", line, "Be brief.")}, HI],
        [{"role": "system", "content": line}, {"role": "system", "content": "Be brief."}, HI],
        [HI, {"role": "system", "content": line + "\nBe brief."}],
    ]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("place", range(8))
def test_prompts_with_other_digits_are_equal(place: int) -> None:
    other = LINE.replace("1ab", "9f0").replace("a1b2c", "00fed")
    for encoder in encoders():
        first, second = (
            encoder.encode_chat(varied(line)[place], ChatOptions()) for line in (LINE, other)
        )
        assert first.token_ids == second.token_ids
        assert "billing" not in first.text
        assert "Be brief." in first.text
        assert first.left_out_billing_line


def test_texts_of_users_and_later_systems_are_not_touched() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": LINE},
        {"role": "user", "content": LINE},
        {"role": "assistant", "content": LINE},
    ]
    for encoder in encoders():
        prompt = encoder.encode_chat(messages, ChatOptions())
        assert prompt.text.count(LINE) == 3
        assert not prompt.left_out_billing_line


def test_a_chat_of_nothing_else_is_a_chat_still() -> None:
    for encoder in encoders():
        prompt = encoder.encode_chat([{"role": "system", "content": LINE}], ChatOptions())
        assert "billing" not in prompt.text


def test_the_line_may_be_kept() -> None:
    for encoder in encoders(keeps_billing_line=True):
        prompt = encoder.encode_chat(varied(LINE)[0], ChatOptions())
        assert LINE in prompt.text
        assert not prompt.left_out_billing_line
