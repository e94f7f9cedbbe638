"""Whether a model is served with its tower for pictures."""

from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path

from vllm import envs
from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.model_executor.model_loader.checkpoint_files import find_weight_files, read_headers
from vllm.model_executor.towers.files import find_fingerprint, find_obstacle, pick_tensors
from vllm.model_executor.towers.plans import ImagesPlan
from vllm.multimodal.families import ImageFamily
from vllm.utils.gguf_file import is_gguf

logger = init_logger(__name__)

_VALUE_BYTES = 4
_MMPROJ = "vllm.model_executor.towers.mmproj"
_ALONE = "a GGUF file holds no tower for pictures: give its mmproj file with --mmproj"


@dataclass(frozen=True, slots=True)
class ServedImages:
    """How a served model sees pictures.

    Attributes:
        family: Sizes and texts; None: it sees none.
        reason: Why it sees none.
        fingerprint: Names the tower.
        are_whole: Whether a step holds all of a picture.
        longest: Soft tokens of the largest picture that is served.
        row_bytes: Of what the tower makes of a soft token.
    """

    family: ImageFamily | None
    reason: str = ""
    fingerprint: str = ""
    are_whole: bool = False
    longest: int = 0
    row_bytes: int = 0


def find_images(
    plan: ImagesPlan | None,
    checkpoint: str,
    *,
    obstacle: str = "",
    mmproj: str | None = None,
    is_drawn: bool = False,
    seed: int = 0,
) -> ServedImages:
    """Return how a checkpoint is served.

    Args:
        plan: What its config.json says; None: it has no tower.
        checkpoint: Its folder.
        obstacle: What else stands against it, in words.
        mmproj: The file of its tower, where it is a GGUF file.
        is_drawn: Whether weights are random.
        seed: Of random ones.

    Raises:
        CheckpointError: A file is missing or broken.
        ConfigError: ``mmproj`` holds no tower of this model.
    """
    if plan is None and mmproj is not None:
        raise ConfigError(f"mmproj={mmproj!r} holds a tower that is not served with this model.")
    if plan is None:
        is_alone = is_gguf(checkpoint)
        return ServedImages(None, _ALONE if is_alone else "the model has no tower for pictures")
    if obstacle:
        return ServedImages(None, obstacle)
    are_whole, family = plan.both_ways != "nowhere", plan.family.for_cpu()
    row_bytes = plan.tower.out_width * _VALUE_BYTES
    longest = min(plan.longest or family.max_tokens, family.max_tokens)
    if is_drawn:
        digest = sha256(repr((plan.tower, seed)).encode()).hexdigest()
        return ServedImages(family, "", _name(digest), are_whole, longest, row_bytes)
    if mmproj is not None:
        stored = import_module(_MMPROJ).describe_tower(mmproj)
    elif is_gguf(checkpoint):
        return ServedImages(None, _ALONE)
    else:
        stored = pick_tensors(plan.tower, read_headers(find_weight_files(Path(checkpoint))))
    reason = find_obstacle(plan.tower, stored)
    if reason and mmproj is not None:
        raise ConfigError(f"mmproj={mmproj!r} is not the tower of this model: {reason}.")
    if reason:
        if stored:
            logger.warning("The model is served without pictures: %s", reason)
        return ServedImages(None, f"it is served without pictures: {reason}")
    digest = find_fingerprint(plan.tower, stored)
    return ServedImages(family, "", _name(digest), are_whole, longest, row_bytes)


def _name(digest: str) -> str:
    """Return a tower's name, which is another one where its products are rounded."""
    return sha256(f"{digest} int16".encode()).hexdigest() if envs.VLLM_CPU_TOWER_INT16 else digest


def check_budget(longest: int, are_whole: bool, num_tokens: int, num_requests: int) -> None:
    """Refuse steps too small for a picture that must be computed in one of them.

    Every other running request may take a token of each step before it.

    Args:
        longest: Soft tokens of the largest picture; 0: there are none.
        are_whole: Whether a step holds all of one.
        num_tokens: Of a step.
        num_requests: That run at a time.

    Raises:
        ConfigError: They are.
    """
    if not longest or not are_whole:
        return
    needed = longest + num_requests - 1
    if num_tokens < needed:
        raise ConfigError(
            f"max_num_batched_tokens={num_tokens} is too small: the tokens of a picture, up to "
            f"{longest}, see each other both ways and are computed in one step, beside a "
            f"token of each other request (max_num_seqs={num_requests}). Raise it to at least "
            f"{needed}, lower max_num_seqs, or start with --language-model-only."
        )
