"""Every message between the front end and the engine core, and how it becomes bytes.

    front end --ToCore-->    AddRequests AbortRequests WithdrawPrefixes Ask TellAll Shutdown
    front end <--FromCore--  Ready StartFailed  StepOutputs RequestRejected Answer CoreStatus
                             CoreLost CoreBack Heartbeat Dead

A core first sends Ready or StartFailed, exactly once; Dead is always the last message.
"""

from typing import Any

import msgspec

from vllm import exceptions
from vllm.exceptions import EngineError, UserInputError, VllmError
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error on its way to another process: a class of ``vllm.exceptions`` by name."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def from_exception(cls, error: BaseException) -> "ErrorInfo":
        """Describe ``error``; one that is not ours becomes an EngineError that names its type."""
        if isinstance(error, VllmError):
            return cls(type(error).__name__, str(error), getattr(error, "param", None))
        return cls("EngineError", f"{type(error).__name__}: {error}")

    def to_exception(self) -> VllmError:
        """Rebuild the error."""
        error_type = getattr(exceptions, self.kind, EngineError)
        if issubclass(error_type, UserInputError):
            return error_type(self.message, self.param)
        error: VllmError = error_type(self.message)
        return error


class GroupInfo(msgspec.Struct, frozen=True):
    """One KV cache group.

    Attributes:
        kind: What people call it, such as "sliding window".
        block_size: Tokens of a block.
        num_layers: Caches in the group.
        page_size_bytes: Bytes of a block over the group's caches.
        sliding_window: Tokens that the group keeps; None: all.
        event_step: Tokens between two of its hashes in KV events; 0: they say where a prompt can
            resume.
    """

    kind: str
    block_size: int
    num_layers: int
    page_size_bytes: int
    sliding_window: int | None = None
    event_step: int = 0


class KVCacheInfo(msgspec.Struct, frozen=True):
    """What the KV cache holds and how it is cut.

    Attributes:
        num_blocks: Blocks of the pool, the null block included.
        capacity_tokens: Tokens that fit when requests are as long as allowed.
        capacity_bytes: Bytes of the pool.
        max_concurrency: Requests of ``max_model_len`` tokens that fit at once.
        unit: Tokens under one prefix hash, of which every hit is a multiple.
        smallest_reusable_prefix: Fewest tokens a prefix hit can cover; None: caching is off.
        retention: How window groups keep state for later hits, in words.
        retention_interval: The same as the flag spells it: auto, none, 0 or tokens; None: caching
            is off.
        checkpoint_tokens: Tokens whose dense rows take as many blocks as the largest window state
            that is kept at one place; None: none is kept.
        rebuild_tokens: Tokens to compute for exact window rows where only dense rows are cached;
            None: that is not done.
        dense_token_bytes: Of the rows that all of a prompt leaves, a token.
        checkpoint_bytes: Of the rows and states that resuming at one place needs beside those.
        partial_checkpoint_tokens: ``checkpoint_tokens`` of one inside a prompt, where layers leave
            rows out; None: none does.
        partial_checkpoint_bytes: Likewise.
        cache_dtype: Type of cached rows, what "auto" stands for being found; "auto": the model's.
    """

    num_blocks: int
    capacity_tokens: int
    capacity_bytes: int
    max_concurrency: float
    max_model_len: int
    block_size: int
    unit: int
    smallest_reusable_prefix: int | None
    retention: str
    groups: tuple[GroupInfo, ...]
    retention_interval: str | None = None
    checkpoint_tokens: int | None = None
    rebuild_tokens: int | None = None
    dense_token_bytes: int | None = None
    checkpoint_bytes: int | None = None
    partial_checkpoint_tokens: int | None = None
    partial_checkpoint_bytes: int | None = None
    cache_dtype: str = "auto"


class AddRequests(msgspec.Struct, frozen=True, tag="add"):
    """New requests, which the core takes in between two steps, all of them."""

    requests: list[EngineCoreRequest]


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Requests nobody waits for any more; unknown ids are ignored."""

    request_ids: list[str]


class WithdrawPrefixes(msgspec.Struct, frozen=True, tag="withdraw"):
    """Prefixes held for other engines that none will load; unknown names are ignored."""

    names: list[str]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question (``questions``), answered by an Answer with the same id.

    Attributes:
        kind: Its name.
        body: What is asked, as MessagePack.
    """

    call_id: int
    kind: str
    body: bytes


class TellAll(msgspec.Struct, frozen=True, tag="tell_all"):
    """Let the next CoreStatus say all there is; whoever missed one sends this."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop at once; running requests get no further output."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The core can serve.

    Attributes:
        load_s: Seconds spent reading weights and setting up the device.
        start_s: Seconds from the launch to this message.
        kv_caches: Of every core, where there are several; ``kv_cache`` is what all of them have.
    """

    pid: int
    kv_cache: KVCacheInfo
    load_s: float
    start_s: float
    kv_caches: list[KVCacheInfo] = []


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The core cannot start."""

    error: ErrorInfo


class StepOutputs(msgspec.Struct, frozen=True, tag="out"):
    """A step's outputs."""

    outputs: EngineCoreOutputs


class RequestRejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The core refuses a request (it can never fit, for instance)."""

    request_id: str
    error: ErrorInfo


class Answer(msgspec.Struct, frozen=True, tag="answer", omit_defaults=True):
    """The answer to a question.

    Attributes:
        body: What is answered, as MessagePack.
        error: Why nothing is.
    """

    call_id: int
    body: bytes = b""
    error: ErrorInfo | None = None


class CoreStatus(msgspec.Struct, frozen=True, tag="changes", omit_defaults=True):
    """What one of several cores tells all front ends of its cache and load, for routing.

    Attributes:
        num_running: Requests that run.
        num_waiting: Requests that wait.
        num_unused_blocks: Blocks that hold nothing anybody asked to keep.
        is_cleared: Whether what is stored is all there is: the cache was emptied before, or
            somebody asked for everything.
        stored: Prefixes that came, by group, as the last 64 bits of their hashes.
        removed: Prefixes that went.
        holes: Dense prefixes that are gone while longer ones are here; None: as told before.
        epoch: Of the core's start; numbers count from it.
        number: Of this message, from 0; whoever misses one asks for everything.
        kept: What tiers behind the pool gained: row groups (0) and places to resume (1).
        unkept: What they lost.
        kept_step: Tokens of a row group; 0: there is no tier.
    """

    num_running: int
    num_waiting: int
    num_unused_blocks: int
    is_cleared: bool = False
    stored: dict[int, list[int]] = {}
    removed: dict[int, list[int]] = {}
    holes: list[int] | None = None
    epoch: int = 0
    number: int = 0
    kept: dict[int, list[int]] = {}
    unkept: dict[int, list[int]] = {}
    kept_step: int = 0


class CoreLost(msgspec.Struct, frozen=True, tag="lost"):
    """One of several cores died, and the others go on."""

    engine_index: int
    message: str


class CoreBack(msgspec.Struct, frozen=True, tag="back"):
    """A core that had died serves again."""

    engine_index: int


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent by a thread of the core beside its step loop.

    Attributes:
        progress: A count that grows whenever the step loop gets on.
        busy: Whether the step loop has work.
    """

    progress: int
    busy: bool


class Dead(msgspec.Struct, frozen=True, tag="dead"):
    """The core died."""

    message: str


ToCore = AddRequests | AbortRequests | WithdrawPrefixes | Ask | TellAll | Shutdown
FromCore = (
    Ready
    | StartFailed
    | StepOutputs
    | RequestRejected
    | Answer
    | CoreStatus
    | CoreLost
    | CoreBack
    | Heartbeat
    | Dead
)


class Codec:
    """Turns messages into MessagePack and back; safe to use from several threads."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._to_core: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToCore)
        self._from_core: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromCore)

    def encode(self, message: ToCore | FromCore) -> bytes:
        """Return the bytes of a message."""
        return self._encoder.encode(message)

    def decode_to_core(self, data: bytes) -> ToCore:
        """Read a message to the core.

        Raises:
            msgspec.ValidationError: The bytes are none.
        """
        message: ToCore = self._to_core.decode(data)
        return message

    def decode_from_core(self, data: bytes) -> FromCore:
        """Read a message from the core.

        Raises:
            msgspec.ValidationError: The bytes are none.
        """
        message: FromCore = self._from_core.decode(data)
        return message
