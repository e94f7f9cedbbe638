"""What goes between the engine core and the ranks of a model."""

from dataclasses import dataclass
from typing import Any

from vllm import exceptions
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import WorkerPlace
from vllm.exceptions import EngineError, VllmError
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput


@dataclass(frozen=True, slots=True)
class MakeWorker:
    """Make the worker and take its device; answered with ``WorkerInfo``.

    Attributes:
        vllm_config: The configuration, the platform's defaults filled in.
        place: Where the worker stands among the others.
    """

    vllm_config: VllmConfig
    place: WorkerPlace


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker knows once its device is in use.

    Attributes:
        specs: Of its caches, by name.
        total_bytes: Memory of its device.
    """

    specs: dict[str, KVCacheSpec]
    total_bytes: int


@dataclass(frozen=True, slots=True)
class BuildModel:
    """Build the model, its weights unread; answered with ``WeightNeeds``."""


@dataclass(frozen=True, slots=True)
class WeightNeeds:
    """What a worker's part of the weights will take, and what was free before."""

    weight_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Read the weights; answered with the caches' specs, which then tell what weights decide."""


@dataclass(frozen=True, slots=True)
class MeasureMemory:
    """Tell the bytes that the KV pool may take."""


@dataclass(frozen=True, slots=True)
class MakeKVCache:
    """Make the KV pool; answered with None."""

    kv_cache_config: KVCacheConfig


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run a step.

    The first rank answers with ``StepResult``, the others with what their KV connectors report.
    """

    scheduler_output: SchedulerOutput


@dataclass(frozen=True, slots=True)
class BeginStep:
    """Hand a step to the device; answered with None, before its tokens are there."""

    scheduler_output: SchedulerOutput


@dataclass(frozen=True, slots=True)
class TakeStep:
    """Wait for the first step that was begun and not taken; answered as ``RunStep``."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, and what it drafted for the next one."""

    output: ModelRunnerOutput
    drafts: DraftTokenIds | None


@dataclass(frozen=True, slots=True)
class BindWake:
    """Rouse the engine core when a load has ended; answered with whether the rank does."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Release the device; answered with None."""


Order = (
    MakeWorker
    | BuildModel
    | LoadModel
    | MeasureMemory
    | MakeKVCache
    | RunStep
    | BeginStep
    | TakeStep
    | BindWake
    | Stop
)

STEP_ORDERS = (RunStep, BeginStep, TakeStep)
"""Orders after which a rank's silence is a fault: others wait for it in a collective."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of an order."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """An order could not be carried out.

    Attributes:
        kind: Name of a class of ``vllm.exceptions``.
        message: For people.
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life while an order is carried out.

    Attributes:
        effort_s: Seconds in which the rank's working thread used a core or waited for one, so far.
    """

    effort_s: float


def rebuild_failure(rank: int, failure: Failure) -> VllmError:
    """Return the error of a rank, of its own class; one that is not ours names the rank."""
    error_type = getattr(exceptions, failure.kind, EngineError)
    prefix = f"rank {rank}: " if error_type is EngineError else ""
    error: VllmError = error_type(prefix + failure.message)
    return error


FromRank = Answer | Failure | Beat
