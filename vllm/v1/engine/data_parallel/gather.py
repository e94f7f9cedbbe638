"""A question that goes to several cores, and one answer made of theirs."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from vllm.exceptions import VllmError
from vllm.v1.engine.questions import merge_answers
from vllm.v1.engine.wire import Answer, Ask


class Gathering:
    """Answers of several cores to one question; a core that dies owes none. Any thread settles it.

    Args:
        message: What was asked.
        calls: What each core's answer comes to, by rank.
        done: Gets the answer of all, once.
    """

    def __init__(
        self, message: Ask, calls: Sequence[Future[Answer]], done: Callable[[Answer], None]
    ) -> None:
        self._message = message
        self._calls = calls
        self._done = done
        self._lock = threading.Lock()
        self._num_left = len(calls)
        for call in calls:
            call.add_done_callback(self._note)
        if not calls:
            done(merge_answers(message, ()))

    def _note(self, _call: Future[Answer]) -> None:
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            answers = [
                call.result() for call in self._calls if not isinstance(call.exception(), VllmError)
            ]
            self._done(merge_answers(self._message, answers))
