"""The engine: its core loop, its process, its clients; the structs between them."""

from vllm.v1.engine.messages import (
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
