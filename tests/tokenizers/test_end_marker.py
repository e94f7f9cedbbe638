"""A continued answer's prompt ends with the answer, whatever its letters are."""

import pytest

from tests.tokenizers.family_tokenizers import FAMILIES, byte_level
from tests.tokenizers.order_templates import ORDERS
from tests.tokenizers.test_rendering import FAMILIES as RENDERED
from vllm.exceptions import UserInputError
from vllm.tokenizers import ChatOptions, make_chat_encoder
from vllm.tokenizers.chat_messages import ChatMessage
from vllm.tokenizers.chat_template import JinjaChatEncoder
from vllm.tokenizers.end_marker import EndMarker

# Letters of formats, of roles, of the marker; spaces; nothing.
CONTENTS = [
    *("end", "<", "im", "", "|", "|>", "im_end", "<|im_end|>", "assistant", "user", "\n", " "),
    *("The answer is", "The answer is ", "The answer is\n\n", "  The", "e", "n", ">", "_", "</s>"),
    *("a" * 50, "[/A]", "/", "turn", "<end_of_turn>", "model", "endofcontent", "é漢🏔", "{", '"'),
    *("```python\n", "1.", "eos", "\t"),
]
OPEN = ChatOptions(add_generation_prompt=False, continue_final_message=True)
TEMPLATES = {
    **ORDERS,
    **{f"rendered {name}": template for name, (template, _) in RENDERED.items()},
    "trims": "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}</end>\n{% endfor %}",
    "thinks": "{% for m in messages %}<{{ m.role }}>\n{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}",
}
# The same tokens as a longer answer begins with: what is there is what would be there.
LONGER = "$ and more$"


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_the_prompt_ends_with_the_content(name: str) -> None:
    encoder = JinjaChatEncoder(byte_level(), TEMPLATES[name])
    question = {"role": "user", "content": "Well?"}
    is_trimmed = "trim" in TEMPLATES[name]
    for content in CONTENTS:
        chats = [
            [question, {"role": "assistant", "content": text}]
            for text in (content, content + LONGER)
        ]
        open_text = encoder.encode_chat(chats[0], OPEN).text
        longer = encoder.encode_chat(chats[1], ChatOptions(add_generation_prompt=False)).text
        head = longer[: longer.rindex(LONGER)]
        cut = content.rstrip() if is_trimmed and content.strip() else content
        expected = head[: len(head) - len(content) + len(cut)]
        assert open_text == expected, (name, content)


@pytest.mark.parametrize("make", FAMILIES.values(), ids=list(FAMILIES))
def test_parts_are_continued_behind_the_last(make) -> None:
    encoder = make_chat_encoder({}, make())
    parts = [{"type": "text", "text": text} for text in ("so", "end")]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": parts}]
    assert encoder.encode_chat(messages, OPEN).text.endswith("so\nend")


def test_a_template_that_hides_the_content_is_named() -> None:
    with pytest.raises(UserInputError, match="does not show the last message"):
        EndMarker().cut("nothing", ChatMessage("assistant", "x"))
