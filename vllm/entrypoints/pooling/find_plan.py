"""Which plan a served model has: its own files say, or it is a model that generates text."""

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from vllm.config import ModelConfig
from vllm.entrypoints.pooling.plan import VectorPlan, YesNo
from vllm.entrypoints.pooling.sentence_files import (
    has_sentence_files,
    read_plan,
    read_projection,
)
from vllm.exceptions import ConfigError, UnsupportedModelError
from vllm.model_executor.model_loader.vector_checkpoints import find_projection
from vllm.model_executor.models.registry import resolve_model
from vllm.tokenizers import Tokenizer
from vllm.utils.gguf_file import is_gguf

_GGUF_PLAN = "vllm.entrypoints.pooling.gguf_plan"
# Its config.json is that of the model it was trained from.
_RERANKER = re.compile(r"qwen3-reranker", re.IGNORECASE)
_KNOWN_PROMPT = "Judge whether the Document meets the requirements"
_RERANKER_FLAG = "is_original_qwen3_reranker"


def find_plan(model: ModelConfig, tokenizer: Tokenizer) -> VectorPlan:
    """Return how a model makes vectors and scores.

    Raises:
        ConfigError: Its files are broken.
        UnsupportedModelError: They ask for what is not served.
    """
    parsed = resolve_model(model.architectures).parse_config(model.hf_config)
    folder = Path(model.path or model.model)
    found = find_projection(folder) if folder.is_dir() and model.sees_both_ways else None
    projection = None if found is None else read_projection(found)
    row_size = parsed.hidden_size if projection is None else len(projection.weight)
    if folder.is_dir() and has_sentence_files(folder):
        plan = read_plan(folder, row_size, generates=model.generates)
    else:
        plan = VectorPlan(size=row_size, generates=model.generates)
    plan = replace(plan, projection=projection)
    ranks = False
    if is_gguf(folder):
        plan, ranks = import_module(_GGUF_PLAN).read_gguf_plan(str(folder), plan)
    if plan.yes_no is not None and not _has_known_prompt(tokenizer):
        raise UnsupportedModelError(
            f"{folder}: its modules name a LogitScore, and its chat template is not that of "
            "Qwen3-Reranker: how it asks about a query and a document is not known here."
        )
    names = (model.model, model.path or "", *model.served_model_names, *model.aliases)
    ranks = ranks or any(_RERANKER.search(name) for name in names)
    if plan.yes_no is None and (ranks or model.hf_config.get(_RERANKER_FLAG)):
        ids = [tokenizer.token_to_id(word) for word in ("yes", "no")]
        if None in ids:
            raise ConfigError(
                "A reranker's answers are the tokens 'yes' and 'no', which its vocabulary lacks: "
                "use the tokenizer that belongs to the checkpoint."
            )
        plan = replace(plan, yes_no=YesNo(*(i for i in ids if i is not None)))
    return plan


def _has_known_prompt(tokenizer: Tokenizer) -> bool:
    """Whether the template of a reranker writes the one prompt that is known."""
    template = tokenizer.chat_templates.get("default", _KNOWN_PROMPT)
    return _KNOWN_PROMPT in template
