"""Publishing of KV cache events."""

from dataclasses import dataclass

from vllm.exceptions import ConfigError


@dataclass(frozen=True)
class KVEventsConfig:
    """Where KV cache events go.

    Attributes:
        enable_kv_cache_events: Whether events are made at all.
        publisher: "zmq" or "null"; None: zmq when enabled.
        endpoint: ZMQ address to publish on; ``*`` binds.
        replay_endpoint: ZMQ address that answers replay requests; None: none.
        buffer_steps: Batches kept for replay.
        hwm: ZMQ high-water mark in messages.
        max_queue_size: Batches waiting for the publisher thread.
        topic: Subscription topic.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        if self.publisher is None:
            chosen = "zmq" if self.enable_kv_cache_events else "null"
            object.__setattr__(self, "publisher", chosen)
        if self.publisher not in ("zmq", "null"):
            raise ConfigError(
                f"KV events publisher {self.publisher!r} is unknown: use zmq or null."
            )
