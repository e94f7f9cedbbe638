"""Several engine cores that look like one to the engine in front of them."""

import threading
from collections.abc import Callable, Sequence
from functools import partial, singledispatchmethod

import msgspec

from vllm.config import VllmConfig
from vllm.exceptions import EngineCoreLostError, EngineDeadError, EngineError, VllmError
from vllm.logger import init_logger
from vllm.v1.engine.client import STOP_TIMEOUT_S, AsyncEngineCoreHandle, MailboxHandle
from vllm.v1.engine.data_parallel.gather import Gathering
from vllm.v1.engine.data_parallel.router import (
    PromptHasher,
    Router,
    RouterSettings,
    make_prompt_hasher,
    with_hashes,
)
from vllm.v1.engine.data_parallel.warm_start import Asker, pull_from_neighbours
from vllm.v1.engine.pending_calls import PendingCalls
from vllm.v1.engine.questions import Question
from vllm.v1.engine.wire import (
    AbortRequests,
    AddRequests,
    Answer,
    Ask,
    CoreBack,
    CoreLost,
    CoreStatus,
    Dead,
    ErrorInfo,
    FromCore,
    Ready,
    RequestRejected,
    StepOutputs,
    TellAll,
    ToCore,
    WithdrawPrefixes,
)
from vllm.v1.messages import EngineCoreRequest

logger = init_logger(__name__)

CoreLauncher = Callable[[int], AsyncEngineCoreHandle]


class DataParallelCores(MailboxHandle):
    """A handle of several cores: requests go to the one that suits, questions to all.

    Without fault tolerance the first core that dies ends everything, as a single one would. With it
    only the requests of that core fail, and it may be started again.

    Owns: the cores' handles, the router, the questions that wait for each core's answers.

    Args:
        config: Of the engine; its ``parallel_config`` says how many cores there are.
        launch: Starts the core of a rank and returns at once.
    """

    def __init__(self, config: VllmConfig, launch: CoreLauncher) -> None:
        super().__init__()
        parallel = config.parallel_config
        self._config = config
        self._launch = launch
        self._is_tolerant = parallel.data_parallel_fault_tolerance
        self._num_restarts_left = [parallel.data_parallel_restarts] * parallel.data_parallel_size
        self._lock = threading.RLock()
        self._calls = [PendingCalls() for _ in range(parallel.data_parallel_size)]
        self._ready: Ready | None = None
        self._router: Router | None = None
        self._hash_prompt: PromptHasher | None = None
        self._closing = False
        self._handles: list[AsyncEngineCoreHandle] = []
        try:
            for rank in range(parallel.data_parallel_size):
                self._handles.append(launch(rank))
        except BaseException:
            self.shutdown()
            raise

    # ---- the handle --------------------------------------------------------------------------

    def wait_ready(self) -> Ready:
        """Block until every core serves.

        Raises:
            VllmError: One cannot start; the others are stopped.
        """
        if self._ready is not None:
            return self._ready
        try:
            readies = [handle.wait_ready() for handle in self._handles]
        except BaseException:
            self.shutdown()
            raise
        for rank, ready in enumerate(readies):
            logger.info(
                "Engine core of data parallel rank %d: process %d, %s blocks of KV cache.",
                rank,
                ready.pid,
                f"{ready.kv_cache.num_blocks:,}",
            )
        merged = _merge_ready(readies)
        self._hash_prompt = make_prompt_hasher(self._config, merged.kv_cache.unit)
        self._router = Router(RouterSettings.from_config(self._config, merged.kv_cache))
        for rank, handle in enumerate(self._handles):
            handle.subscribe(partial(self._take, rank=rank, router=self._router))
        self._ready = merged
        return merged

    def send(self, message: ToCore) -> None:
        """Send a message to the cores that it concerns; refusals come back as messages."""
        if self._dead_error is not None or self._router is None:
            return
        self._send(message, self._router)

    def living(self) -> Sequence[int]:
        """Return the ranks of the cores that serve."""
        return () if self._router is None else self._router.living()

    def shutdown(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Stop every core, by force after ``timeout`` seconds."""
        with self._lock:
            self._closing = True
            handles = list(self._handles)
        stopping = [
            threading.Thread(target=handle.shutdown, args=(timeout,), name="stop-core")
            for handle in handles
        ]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()

    # ---- to the cores ------------------------------------------------------------------------

    @singledispatchmethod
    def _send(self, message: ToCore, router: Router) -> None:
        """Send a message; those of no method here are not for several cores."""

    @_send.register
    def _send_requests(self, message: AddRequests, router: Router) -> None:
        by_rank: dict[int, list[EngineCoreRequest]] = {}
        for unhashed in message.requests:
            request = with_hashes(unhashed, self._hash_prompt)
            try:
                by_rank.setdefault(router.route(request), []).append(request)
            except VllmError as error:
                refusal = RequestRejected(request.request_id, ErrorInfo.from_exception(error))
                self._mailbox.put(refusal)
        for rank, requests in by_rank.items():
            self._handles[rank].send(AddRequests(requests))

    @_send.register
    def _send_aborts(self, message: AbortRequests, router: Router) -> None:
        by_rank: dict[int, list[str]] = {}
        for request_id in message.request_ids:
            rank = router.end(request_id)
            if rank is not None:
                by_rank.setdefault(rank, []).append(request_id)
        for rank, ids in by_rank.items():
            self._handles[rank].send(AbortRequests(ids))

    @_send.register
    def _send_withdrawal(self, message: WithdrawPrefixes, router: Router) -> None:
        # Only one of them knows a name.
        for rank in router.living():
            self._handles[rank].send(message)

    @_send.register
    def _send_question(self, message: Ask, router: Router) -> None:
        ranks = router.living()
        try:
            ranks = ranks[:1] if Question.of(message).is_for_one else ranks
        except EngineError as error:
            self._mailbox.put(Answer(message.call_id, error=ErrorInfo.from_exception(error)))
            return
        calls = [
            self._calls[rank].open(partial(_renumber, message), self._handles[rank].send)
            for rank in ranks
        ]
        Gathering(message, calls, self._mailbox.put)
        for rank in set(ranks) - set(router.living()):
            # It died before its question was noted here.
            self._calls[rank].fail_all(_lost(rank))

    # ---- from the cores ----------------------------------------------------------------------

    @singledispatchmethod
    def _take(self, message: FromCore, rank: int, router: Router) -> None:
        """Take in a message of a core; those of no method here are for nobody."""

    @_take.register
    def _take_step(self, message: StepOutputs, rank: int, router: Router) -> None:
        message.outputs.engine_index = rank
        router.take_step(message.outputs.outputs)
        self._mailbox.put(message)

    @_take.register
    def _take_status(self, message: CoreStatus, rank: int, router: Router) -> None:
        if router.observe(rank, message):
            self._handles[rank].send(TellAll())

    @_take.register
    def _take_refusal(self, message: RequestRejected, rank: int, router: Router) -> None:
        router.end(message.request_id)
        self._mailbox.put(message)

    @_take.register
    def _take_answer(self, message: Answer, rank: int, router: Router) -> None:
        self._calls[rank].settle(message)

    # ---- death and return --------------------------------------------------------------------

    @_take.register
    def _take_loss(self, message: CoreLost, rank: int, router: Router) -> None:
        # Somebody else keeps the cores, and says that there will be others.
        self._lose(rank, message.message, router)

    @_take.register
    def _take_return(self, message: Ready, rank: int, router: Router) -> None:
        self._welcome(rank, message, router)

    @_take.register
    def _take_death(self, message: Dead, rank: int, router: Router) -> None:
        if self._closing:
            return
        num_restarts = self._num_restarts_left[rank]
        if not self._is_tolerant or not (router.num_alive(without=rank) or num_restarts):
            self._die(f"Data parallel rank {rank}: {message.message}")
            return
        self._lose(rank, message.message, router)
        if num_restarts:
            self._num_restarts_left[rank] -= 1
            threading.Thread(
                target=self._restart, args=(rank, router), name="restart-core", daemon=True
            ).start()

    def _die(self, reason: str) -> None:
        self._dead_error = EngineDeadError(reason)
        self._mailbox.put(Dead(reason))

    def _lose(self, rank: int, reason: str, router: Router) -> None:
        """Fail the requests of a core that died, and expect no answers of it."""
        lost = router.lose(rank)
        logger.error(
            "Data parallel rank %d is lost: %s Its %d requests here fail; cores left: %d.",
            rank,
            reason,
            len(lost),
            router.num_alive(),
        )
        error = ErrorInfo.from_exception(_lost(rank))
        for request_id in lost:
            self._mailbox.put(RequestRejected(request_id, error))
        self._mailbox.put(CoreLost(rank, reason))
        self._calls[rank].fail_all(_lost(rank))

    def _restart(self, rank: int, router: Router) -> None:
        """Start a dead core again and send it requests once it serves."""
        try:
            # Not under the lock: on a cluster it waits for room.
            handle = self._launch(rank)
            with self._lock:
                is_late = self._closing
                if not is_late:
                    self._handles[rank] = handle
            if is_late:
                handle.shutdown()
                return
            logger.warning("The engine core of data parallel rank %d is started again.", rank)
            ready = handle.wait_ready()
        except VllmError as error:
            logger.error("The engine core of data parallel rank %d stays dead: %s", rank, error)
            if not router.num_alive() and not self._closing:
                self._die(str(error))
            return
        handle.subscribe(partial(self._take, rank=rank, router=router))
        self._warm(rank, router)
        self._welcome(rank, ready, router)

    def _warm(self, new: int, router: Router) -> None:
        """Let a core pull what its neighbours use most, before it gets its share."""
        parallel = self._config.parallel_config
        neighbours = [self._asker(rank) for rank in router.living()]
        if parallel.warm_pull_bytes and neighbours:
            pull_from_neighbours(
                self._asker(new), neighbours, parallel.warm_pull_bytes, parallel.warm_pull_seconds
            )

    def _asker(self, rank: int) -> Asker:
        """Return what puts a question to one core."""
        calls, handle = self._calls[rank], self._handles[rank]
        return lambda question: calls.open(question.to_message, handle.send)

    def _welcome(self, rank: int, ready: Ready, router: Router) -> None:
        """Send requests to a core that was started again."""
        router.revive(rank)
        logger.info(
            "The engine core of data parallel rank %d serves again (process %d).", rank, ready.pid
        )
        self._mailbox.put(CoreBack(rank))


def _renumber(message: Ask, call_id: int) -> Ask:
    return Ask(call_id, message.kind, message.body)


def _lost(rank: int) -> EngineCoreLostError:
    return EngineCoreLostError(
        f"The engine core of data parallel rank {rank} died while it answered this request: "
        "send it again, other cores serve on."
    )


def _merge_ready(readies: list[Ready]) -> Ready:
    """Return what holds of all cores: the smallest cache, the shortest context."""
    infos = [ready.kv_cache for ready in readies]
    smallest = min(infos, key=lambda info: info.num_blocks)
    info = msgspec.structs.replace(
        smallest, max_model_len=min(info.max_model_len for info in infos)
    )
    return Ready(
        readies[0].pid,
        info,
        max(ready.load_s for ready in readies),
        max(ready.start_s for ready in readies),
        kv_caches=infos,
    )
