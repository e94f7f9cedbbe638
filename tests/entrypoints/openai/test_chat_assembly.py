"""Chat messages out of finer items."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.entrypoints.openai.chat_assembly import ChatAssembler
from vllm.tokenizers.chat_messages import parse_messages


def test_a_turn_is_one_message() -> None:
    chat = ChatAssembler()
    chat.add_message("user", ["hi"])
    chat.add_reasoning("hm")
    chat.add_text("Hello")
    chat.add_text(" there", continues=True)
    chat.add_call("c1", "f", "{}")
    chat.add_call("c2", "g", "{}")
    chat.add_tool_result("c1", ["one"])
    chat.add_tool_result("c2", ["two", "more"])
    user, assistant, first, second = chat.messages
    assert user == {"role": "user", "content": "hi"}
    assert assistant["reasoning"] == "hm"
    assert assistant["content"] == "Hello there"
    assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["f", "g"]
    assert first == {"role": "tool", "tool_call_id": "c1", "content": "one"}
    assert second["content"] == [{"type": "text", "text": "two"}, {"type": "text", "text": "more"}]
    assert chat.last_index == 3


def test_what_is_out_of_order_begins_another_turn() -> None:
    chat = ChatAssembler()
    chat.add_text("a")
    chat.add_text("b")  # another answer, not more of the first
    chat.add_call("c", "f", "{}")
    chat.add_reasoning("x")
    chat.add_reasoning("y")
    chat.end_turn()
    chat.add_call("d", "f", "{}")
    contents = [
        (m.get("reasoning"), m["content"], len(m.get("tool_calls", ()))) for m in chat.messages
    ]
    assert contents == [(None, "a", 0), (None, "b", 1), ("x\n\ny", None, 0), (None, None, 1)]


ITEMS = st.lists(
    st.one_of(
        st.tuples(st.just("user"), st.text("abc", max_size=3)),
        st.tuples(st.just("reasoning"), st.text("abc", min_size=1, max_size=3)),
        st.tuples(st.just("text"), st.text("abc", max_size=3)),
        st.tuples(st.just("call"), st.text("abc", min_size=1, max_size=3)),
        st.tuples(st.just("result"), st.text("abc", max_size=3)),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@given(ITEMS)
def test_every_item_is_in_the_chat_in_its_order(items: list[tuple[str, str]]) -> None:
    chat = ChatAssembler()
    for i, (kind, text) in enumerate(items):
        marked = f"{i}:{text}"
        if kind == "user":
            chat.add_message("user", [marked])
        elif kind == "reasoning":
            chat.add_reasoning(marked)
        elif kind == "text":
            chat.add_text(marked)
        elif kind == "call":
            chat.add_call(marked, text, "{}")
        else:
            chat.add_tool_result(marked, ["r"])
    shown = []
    for message in parse_messages(chat.messages):  # a chat that encoders take
        shown += [part for part in message.reasoning.split("\n\n") if part]
        shown += [message.content] if message.role != "tool" and message.content else []
        shown += [call.id or "" for call in message.tool_calls]
        shown += [message.tool_call_id] if message.tool_call_id else []
    assert shown == [f"{i}:{text}" for i, (_, text) in enumerate(items)]
