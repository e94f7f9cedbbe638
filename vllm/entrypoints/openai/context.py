"""What every route needs: the engine, the tokenizer, the served model. Built once, then read."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.entrypoints.openai.client_metrics import ClientMetrics
from vllm.entrypoints.openai.engine_stream import EngineClient
from vllm.entrypoints.openai.protocol.responses import ModelCard, unix_now
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.entrypoints.openai.state import ServerState
from vllm.entrypoints.openai.text_workers import TextWorkers
from vllm.entrypoints.pooling.plan import VectorPlan
from vllm.exceptions import ModelNotFoundError
from vllm.multimodal.image_input import NO_IMAGES, ImageInput
from vllm.parser.registry import ParserChoice
from vllm.tokenizers import ChatEncoder, Tokenizer
from vllm.v1.engine.generation_defaults import answer_limit, sampling_defaults
from vllm.version import ENGINE_NAME, __version__

# What Hugging Face's clients send where their user names no model, and what their pages tell to.
_NO_MODEL = ("dummy", "tgi")
GENERATION = "generation"
UNTRAINED_NOTE = (
    "It was trained to generate text: vectors and scores are what its last layer gives, and no "
    "match for those of a model that was trained for them (docs/embeddings.md)."
)
EMBEDDED_NOTE = (
    "This is the small checkpoint embedded in the package: it looks up facts told in its context "
    "and talks a little. docs/embedded_model.md says what to expect."
)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against, and what responses say about the model.

    Attributes:
        names: Names clients may use; the first is the default.
        root: What the user asked to serve.
        aliases: Further names that clients may use, which ``/v1/models`` does not list.
        max_model_len: Longest prompt + answer in tokens.
        vocab_size: Token ids are below it.
        max_logprobs: Most likely tokens a request may ask for; -1: the whole vocabulary.
        is_embedded: Whether it is the checkpoint inside the package.
        has_priority: Whether the scheduler looks at priorities.
        has_kv_transfer: Whether KV is given to, or taken from, other engines.
        default_sampling: Sampling fields that the checkpoint sets when a request does not.
        fingerprint: The ``system_fingerprint`` of responses.
        max_new_tokens: Most tokens of any answer, whatever a request asks for; None: the context.
        capabilities: What it can be asked for.
        note: What one should know of it; None: nothing.
    """

    names: tuple[str, ...]
    root: str
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    is_embedded: bool
    has_priority: bool
    fingerprint: str
    aliases: tuple[str, ...] = ()
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    has_kv_transfer: bool = False
    max_new_tokens: int | None = None
    capabilities: tuple[str, ...] = (GENERATION,)
    note: str | None = None
    created: int = field(default_factory=unix_now)

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt: one token is left for the answer."""
        return self.max_model_len - 1

    def resolve_name(self, name: str | None) -> str:
        """Return the name a response carries; the first where a request names none.

        Raises:
            ModelNotFoundError: ``name`` is not served.
        """
        if not name or (name in _NO_MODEL and name not in self.names):
            return self.names[0]
        known = (*self.names, *self.aliases)
        if name not in known:
            raise ModelNotFoundError(
                f"The model {name!r} is not served here: use {', '.join(known)}.", "model"
            )
        return name

    def card(self, name: str) -> ModelCard:
        """Return the entry of ``/v1/models`` for one name."""
        card = ModelCard(
            id=name,
            root=self.root,
            max_model_len=self.max_model_len,
            created=self.created,
            owned_by=ENGINE_NAME,
            capabilities=list(self.capabilities),
        )
        if notes := [note for note in (self.is_embedded and EMBEDDED_NOTE, self.note) if note]:
            card.note = " ".join(notes)
        if self.default_sampling:
            card.default_sampling_params = dict(self.default_sampling)
        return card


def make_served_model(
    config: VllmConfig,
    max_model_len: int,
    generation_config: str,
    vectors: VectorPlan | None = None,
    *,
    has_chats: bool = True,
) -> ServedModel:
    """Describe the served model of a resolved configuration.

    Args:
        config: The engine's.
        max_model_len: What the engine settled on (``--max-model-len auto`` depends on memory).
        generation_config: ``--generation-config``: "auto" takes the checkpoint's defaults, "vllm"
            neutral ones.
        vectors: How it makes vectors; None: it is not asked for any.
        has_chats: Whether it has a format for chats.
    """
    model = config.model_config
    defaults = model.generation_config if generation_config == "auto" else {}
    return ServedModel(
        names=tuple(model.served_model_names),
        aliases=model.aliases,
        root=model.model,
        max_model_len=max_model_len,
        vocab_size=int(model.hf_config["vocab_size"]),
        max_logprobs=model.max_logprobs,
        is_embedded=model.is_embedded,
        has_priority=config.scheduler_config.policy == "priority",
        has_kv_transfer=config.kv_transfer_config is not None,
        fingerprint=_fingerprint(config),
        default_sampling=sampling_defaults(defaults),
        max_new_tokens=answer_limit(defaults),
        capabilities=_list_capabilities(
            model.generates, has_chats, vectors, sees=model.image_family is not None
        ),
        note=UNTRAINED_NOTE if vectors is not None and not vectors.is_trained_for_any else None,
    )


def _list_capabilities(
    generates: bool, has_chats: bool, vectors: VectorPlan | None, *, sees: bool
) -> tuple[str, ...]:
    told = {
        GENERATION: generates,
        "images": generates and sees,
        "decisions": generates and has_chats,
        **dict.fromkeys(("embeddings", "rerank", "score"), vectors is not None),
    }
    return tuple(name for name, is_served in told.items() if is_served)


def _fingerprint(config: VllmConfig) -> str:
    """A string that changes whenever equal requests with equal seeds may answer differently."""
    model = config.model_config
    served_model = json.dumps(
        [model.model, str(model.dtype), model.seed, model.hf_config], sort_keys=True, default=str
    )
    return (
        f"{ENGINE_NAME.replace(' ', '-')}-{__version__}-"
        + (hashlib.sha256(served_model.encode()).hexdigest()[:10])
    )


@dataclass(frozen=True, slots=True)
class ServingContext:
    """Everything a route needs, once the engine is up."""

    served_model: ServedModel
    tokenizer: Tokenizer
    chat_encoder: ChatEncoder
    args: ServerArgs
    state: ServerState
    engine: EngineClient
    config: VllmConfig
    parsers: ParserChoice
    client_metrics: ClientMetrics
    vectors: VectorPlan
    images: ImageInput = NO_IMAGES
    workers: TextWorkers = field(default_factory=TextWorkers)
