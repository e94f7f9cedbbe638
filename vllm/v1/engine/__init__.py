"""The engine: its core loop, its process, its clients.

Outsiders import the message structs from here; in this package they come from ``v1.messages``.
"""

from vllm.v1.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LogprobsRows,
    PrefillStats,
)

__all__ = [
    "EngineCoreEvent",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "FinishReason",
    "LogprobsRows",
    "PrefillStats",
]
