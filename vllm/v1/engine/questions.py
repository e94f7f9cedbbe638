"""What may be asked of an engine core: each question is one class here, and nothing else knows it.

    front end   engine.ask(question) --Ask-->     core      question.answer(core, tell), in its loop
                <reply>              <--Answer--  several   question.merge(replies), by rank

To add one: a class, whose fields are what is asked and whose type argument is what is answered, and
its use, which calls ``engine.ask``. Fields and replies are whatever msgspec can put into bytes.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from vllm.exceptions import EngineError, UserInputError, VllmError
from vllm.v1.engine.wire import Answer, Ask, ErrorInfo
from vllm.v1.messages import HeldPrefix, PopularPrefix
from vllm.v1.metrics.stats import PullStats

if TYPE_CHECKING:
    from vllm.cachelab.view.view import CacheView
    from vllm.v1.core.sched.scheduler import Scheduler

Reply = TypeVar("Reply")

# What a question may be refused with; anything else ends the core.
_REFUSALS = (UserInputError, EngineError)


class AskedCore(Protocol):
    """What a question may look at, and change; ``EngineCore`` in production.

    Attributes:
        scheduler: With the cache and the connector.
    """

    scheduler: Scheduler

    def get_cache_view(self) -> CacheView:
        """Return what draws the cache; what was used when is noted from the first call on."""

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget every cached prefix; return whether that was possible."""


class Question(msgspec.Struct, Generic[Reply], frozen=True):
    """A question to an engine core; where there are several, to all of them.

    Attributes:
        is_for_one: Whether only the core of the lowest rank is asked.
    """

    is_for_one: ClassVar[bool] = False
    _reply_type: ClassVar[Any] = None
    _kinds: ClassVar[dict[str, type[Question[Any]]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        (base,) = cls.__orig_bases__  # type: ignore[attr-defined]
        (cls._reply_type,) = base.__args__
        if Question._kinds.setdefault(cls.__name__, cls) is not cls:
            raise TypeError(f"There is a question {cls.__name__} already: choose another name.")

    @abstractmethod
    def answer(self, core: AskedCore, tell: Callable[[Reply], None]) -> None:
        """Tell the answer, once: now, or in a later step; called between two steps.

        Raises:
            UserInputError: What is asked is wrong.
            EngineError: It cannot be answered.
        """

    @abstractmethod
    def merge(self, replies: Sequence[Reply]) -> Reply:
        """Return one reply for those of several cores, by rank; there may be none."""

    # ---- on the wire -------------------------------------------------------------------------

    def to_message(self, call_id: int) -> Ask:
        """Return the question as a message."""
        return Ask(call_id, type(self).__name__, msgspec.msgpack.encode(self))

    @staticmethod
    def of(message: Ask) -> Question[Any]:
        """Return the question that a message carries.

        Raises:
            EngineError: This process knows none of that name, or it has other fields here.
        """
        kind = Question._kinds.get(message.kind)
        if kind is None:
            raise EngineError(f"Nobody knows the question {message.kind!r}: is this core older?")
        try:
            question: Question[Any] = msgspec.msgpack.decode(message.body, type=kind)
        except msgspec.DecodeError as error:
            raise EngineError(f"The question {message.kind} is another one here: {error}") from None
        return question

    def to_answer(self, call_id: int, reply: Reply) -> Answer:
        """Return the answer that carries a reply."""
        return Answer(call_id, msgspec.msgpack.encode(reply))

    def read(self, answer: Answer) -> Reply:
        """Return the reply that an answer carries.

        Raises:
            VllmError: The question was refused.
        """
        if answer.error is not None:
            raise answer.error.to_exception()
        reply: Reply = msgspec.msgpack.decode(answer.body, type=self._reply_type)
        return reply


def answer_message(message: Ask, core: AskedCore, tell: Callable[[Answer], None]) -> None:
    """Have a core answer a question; a refusal is an answer too."""
    try:
        question = Question.of(message)
        question.answer(core, lambda reply: tell(question.to_answer(message.call_id, reply)))
    except _REFUSALS as error:
        tell(_refuse(message, error))


def merge_answers(message: Ask, answers: Sequence[Answer]) -> Answer:
    """Return one answer for those of several cores, by rank; one that refuses speaks for all."""
    try:
        question = Question.of(message)
        reply = question.merge([question.read(answer) for answer in answers])
    except VllmError as error:
        return _refuse(message, error)
    return question.to_answer(message.call_id, reply)


def _refuse(message: Ask, error: VllmError) -> Answer:
    return Answer(message.call_id, error=ErrorInfo.from_exception(error))


# ---- the questions -------------------------------------------------------------------------------


class ResetCache(Question[bool], frozen=True):
    """Forget every cached prefix; the reply: whether that was possible.

    Attributes:
        reset_running_requests: Set running requests back, so that nothing holds the cache.
        reset_connector: Have the connector forget its prefixes too.
    """

    reset_running_requests: bool = False
    reset_connector: bool = False

    def answer(self, core: AskedCore, tell: Callable[[bool], None]) -> None:
        """Reset the cache."""
        tell(core.reset_prefix_cache(self.reset_running_requests, self.reset_connector))

    def merge(self, replies: Sequence[bool]) -> bool:
        """Whether it was possible everywhere."""
        return bool(replies) and all(replies)


class HeldReply(msgspec.Struct, frozen=True):
    """The prefixes that are held, and whether the one to let go of was among them."""

    prefixes: list[HeldPrefix]
    forgotten: bool


class AskHeld(Question[HeldReply], frozen=True):
    """Which prefixes are held, after letting go of one.

    Attributes:
        forget: Id of the prefix to let go of; empty: none.
    """

    forget: str = ""

    def answer(self, core: AskedCore, tell: Callable[[HeldReply], None]) -> None:
        """List them."""
        held, forgotten = core.scheduler.held_prefixes(self.forget)
        tell(HeldReply(list(held), forgotten))

    def merge(self, replies: Sequence[HeldReply]) -> HeldReply:
        """Those of all."""
        prefixes = [prefix for reply in replies for prefix in reply.prefixes]
        return HeldReply(prefixes, any(reply.forgotten for reply in replies))


class EndSession(Question[int], frozen=True):
    """A session is over: what only it used may go first.

    Attributes:
        session: Its number.
    """

    session: int

    def answer(self, core: AskedCore, tell: Callable[[int], None]) -> None:
        """Make its checkpoints spare, or its blocks, and say how many there are."""
        tell(core.scheduler.end_session(self.session))

    def merge(self, replies: Sequence[int]) -> int:
        """Those of all."""
        return sum(replies)


class CacheSnapshot(msgspec.Struct, frozen=True):
    """What the cache holds.

    Attributes:
        body: A ``Snapshot`` as JSON.
        took_s: For which the core stood still.
    """

    body: bytes
    took_s: float


class ViewCache(Question[CacheSnapshot], frozen=True):
    """What the cache holds. A picture shows one cache."""

    is_for_one: ClassVar[bool] = True

    def answer(self, core: AskedCore, tell: Callable[[CacheSnapshot], None]) -> None:
        """Draw it."""
        began = time.perf_counter()
        body = msgspec.json.encode(core.get_cache_view().snapshot())
        tell(CacheSnapshot(body, time.perf_counter() - began))

    def merge(self, replies: Sequence[CacheSnapshot]) -> CacheSnapshot:
        """The only one."""
        return replies[0] if replies else CacheSnapshot(b"", 0.0)


class OfferPopular(Question[list[PopularPrefix]], frozen=True):
    """Hold the prefixes used most for another core to pull, the most used first.

    Attributes:
        max_bytes: Most of them.
    """

    max_bytes: int

    def answer(self, core: AskedCore, tell: Callable[[list[PopularPrefix]], None]) -> None:
        """Hold them; nothing where caches are not shared."""
        connector = core.scheduler.connector
        tell([] if connector is None else list(connector.hooks.offer_popular(self.max_bytes)))

    def merge(self, replies: Sequence[list[PopularPrefix]]) -> list[PopularPrefix]:
        """Those of all, the most used first."""
        offers = [prefix for reply in replies for prefix in reply]
        return sorted(offers, key=lambda prefix: -prefix.weight)


class PullPopular(Question[PullStats], frozen=True):
    """Pull prefixes that others hold; the reply comes when that has ended.

    Attributes:
        prefixes: The most wanted first.
        max_bytes: Most to pull.
        seconds: For how long.
    """

    prefixes: list[PopularPrefix]
    max_bytes: int
    seconds: float

    def answer(self, core: AskedCore, tell: Callable[[PullStats], None]) -> None:
        """Begin to pull; nothing where caches are not shared."""
        connector = core.scheduler.connector
        if connector is None or not self.prefixes:
            tell(PullStats())
        else:
            connector.hooks.take_popular(self.prefixes, self.max_bytes, self.seconds, tell)

    def merge(self, replies: Sequence[PullStats]) -> PullStats:
        """The only one: a new core pulls alone."""
        return replies[0] if replies else PullStats()
