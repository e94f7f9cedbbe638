import asyncio

import pytest

from vllm.exceptions import EngineDeadError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.output_queue import OutputQueue
from vllm.v1.engine.request_stream import RequestStream


def output(text: str, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [1], None, [CompletionOutput(0, text, [1])], finished)


async def test_a_slow_reader_gets_everything_at_once():
    queue = OutputQueue(deltas=True)
    for text in "abc":
        queue.put(output(text))
    assert (await queue.get()).outputs[0].text == "abc"
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.put(output("d"))
    assert (await waiting).outputs[0].text == "d"


async def test_what_came_before_an_error_is_read_first():
    queue = OutputQueue(deltas=False)
    queue.put(output("a"))
    queue.fail(EngineDeadError("gone"))
    assert (await queue.get()).outputs[0].text == "a"
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            await queue.get()


async def test_leaving_a_stream_is_told_once_and_only_before_its_end():
    left = []
    queue = OutputQueue(deltas=True)
    stream = RequestStream("r", queue, lambda: left.append("early"))
    await stream.aclose()
    await stream.aclose()
    assert left == ["early"]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)

    done = RequestStream("r", queue, lambda: left.append("late"))
    queue.put(output("a", finished=True))
    assert [o.outputs[0].text async for o in done] == ["a"]
    await done.aclose()
    del done
    assert left == ["early"]
