"""Every error this project raises on purpose, in one tree.

    VllmError
    ├── UserInputError            the request is wrong           HTTP 400
    │   ├── ModelNotFoundError    unknown model name             HTTP 404
    │   ├── ResponseNotFoundError no such stored response        HTTP 404
    │   ├── PrefixNotFoundError   no such kept prefix            HTTP 404
    │   ├── FileNotStoredError    no such file or batch          HTTP 404
    │   ├── ContextLengthError    a prompt fills the context     HTTP 400
    │   ├── TextLengthError       a text exceeds the context     HTTP 400
    │   ├── ThreadsUnsupportedError  a thread of Anthropic's     HTTP 400
    │   └── UnsupportedFeatureError  known, but not served yet   HTTP 400
    ├── TenantLimitError          a tenant exceeds its limits    HTTP 429 + Retry-After
    ├── ConfigError               a flag or a file is wrong; raised before weights load
    │   ├── UnsupportedModelError an architecture we do not serve
    │   ├── PoolTooSmallError     the KV cache does not hold one request of the longest length
    │   └── DeviceMemoryError     weights, steps or graphs do not fit in a device
    ├── CheckpointError           missing, unexpected or misshapen tensors
    ├── EngineError               the engine cannot serve        HTTP 500
    │   ├── EngineDeadError       the engine core died or hangs  HTTP 503
    │   ├── EngineCoreLostError   one of several cores died      HTTP 503 + Retry-After
    │   ├── QueueFullError        too many requests wait         HTTP 503 + Retry-After
    │   └── ShuttingDownError     the server drains              HTTP 503 + Retry-After
    ├── NoFreeBlocksError         no blocks now; caught where room is asked for
    └── InvariantError            our own bug: a numbered invariant (I1..I7) does not hold

The HTTP status of each class is mapped in one place, ``entrypoints/openai/errors.py``.
"""

from functools import partial


class VllmError(Exception):
    """Root of every deliberate error."""


class UserInputError(VllmError, ValueError):
    """A request is wrong.

    Args:
        message: Names the value, the limit and what to do.
        param: The request field at fault, if one is.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PrefixNotFoundError(UserInputError):
    """A request names a kept prefix that there is not."""


class FileNotStoredError(UserInputError):
    """A request names a file or a batch that there is not."""


class ContextLengthError(UserInputError):
    """A prompt leaves no room for an answer.

    Clients shorten the conversation and try again where they find the very words by which the API
    tells this, so each API says it in its own; the message is that of OpenAI's.

    Args:
        num_tokens: Of the prompt.
        limit: Of the context, prompt and answer together.
        num_asked: Tokens of the answer that were asked for, at least one.
        of_messages: Whether the prompt is a chat.
        is_bound: Whether ``num_tokens`` is the least that so long a text can have: it was not read.
        where: Names the one of several prompts; empty: there is one.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        num_tokens: int,
        limit: int,
        num_asked: int = 1,
        *,
        of_messages: bool = False,
        is_bound: bool = False,
        where: str = "",
    ) -> None:
        self._told = partial(
            ContextLengthError,
            num_tokens,
            limit,
            num_asked,
            of_messages=of_messages,
            is_bound=is_bound,
        )
        what = "messages" if of_messages else "prompt"
        named = f"{where}: " if where else ""
        unread = " These are the fewest that so long a text can have." if is_bound else ""
        super().__init__(
            f"{named}This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_tokens + num_asked} tokens ({num_tokens} in the {what}, {num_asked} in the "
            f"completion).{unread} Please reduce the length of the {what} ({self.code}).",
            "input_tokens",
        )
        self.num_tokens = num_tokens
        self.limit = limit

    def at(self, where: str) -> "ContextLengthError":
        """Return the same error of one of several prompts."""
        return self._told(where=where)


class TextLengthError(UserInputError):
    """A text, of which no answer is wanted, is longer than the model takes.

    Args:
        num_tokens: Of the text.
        limit: Of the longest.
        is_bound: Whether ``num_tokens`` is the least that so long a text can have: it was not read.
    """

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, limit: int, *, is_bound: bool = False) -> None:
        unread = " These are the fewest that so long a text can have." if is_bound else ""
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, a text of this "
            f"request has {num_tokens} tokens.{unread} Please shorten it, or let it be cut by "
            f"truncate_prompt_tokens=-1 ({self.code}).",
            "input",
        )
        self.num_tokens = num_tokens
        self.limit = limit


class ThreadsUnsupportedError(UserInputError):
    """A Messages request goes on with a conversation that the server is to remember.

    Anthropic's clients then send all of it.
    """


class ModelNotFoundError(UserInputError):
    """A request names a model that is not served here."""


class ResponseNotFoundError(UserInputError):
    """A request names a response or an item that is not stored."""


class UnsupportedFeatureError(UserInputError):
    """A request uses a known feature that this server does not offer yet."""


class TenantLimitError(VllmError):
    """A tenant asks for more than it may.

    Args:
        message: Whose limit, and by how much.
        limit: Name of the limit.
        retry_after_s: Seconds after which trying again is reasonable.
    """

    code = "rate_limit_exceeded"

    def __init__(self, message: str, limit: str, retry_after_s: int = 1) -> None:
        super().__init__(f"{message} Retry in {retry_after_s} s.")
        self.limit = limit
        self.retry_after_s = retry_after_s


class ConfigError(VllmError, ValueError):
    """A flag, a variable or a configuration file is wrong."""


class UnsupportedModelError(ConfigError):
    """The checkpoint's architecture is not one we serve."""


class PoolTooSmallError(ConfigError):
    """The KV cache does not hold one request of the longest length.

    Args:
        message: Names both sizes and the flags of a server to change.
        fact: The message without those flags, for commands that have others; empty: the message.
    """

    def __init__(self, message: str, fact: str = "") -> None:
        super().__init__(message)
        self.fact = fact or message


class DeviceMemoryError(ConfigError):
    """A device's memory is too small for what the flags ask for.

    Args:
        message: Names what was asked for, what is free and the flags to change.
        asked_bytes: What there was no room for; None: the allocator did not say.
        free_bytes: What the device had left; None: it did not say.
    """

    def __init__(
        self, message: str, asked_bytes: int | None = None, free_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.asked_bytes, self.free_bytes = asked_bytes, free_bytes


class CheckpointError(VllmError):
    """A checkpoint's tensors do not fit the model."""


class EngineError(VllmError):
    """The engine cannot serve."""


class EngineDeadError(EngineError):
    """The engine core died, or its heartbeat stopped."""


class EngineCoreLostError(EngineError):
    """The engine core that answered a request died, and others go on: send it again."""


class QueueFullError(EngineError):
    """More requests wait than the server was told to hold.

    Args:
        message: What is full and its limit.
        retry_after_s: Seconds after which trying again is reasonable.
        limit: Name of the setting that was met.
    """

    def __init__(
        self, message: str, retry_after_s: int = 1, limit: str = "max_num_queued_reqs"
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_s = retry_after_s


class ShuttingDownError(EngineError):
    """The server drains and takes no new requests."""


class NoFreeBlocksError(VllmError, ValueError):
    """The pool gives no blocks for what it was asked; nothing was taken.

    Whoever asks for room takes it as "not now", as when fewer blocks are free than needed.
    """


class InvariantError(VllmError):
    """A numbered invariant of the KV cache does not hold; only a process edge may catch it."""
