"""Facts of the model."""

from dataclasses import replace

import msgspec
import pytest

from tests.entrypoints.openai.conftest import SERVED_MODEL
from vllm.entrypoints.openai.context import make_served_model
from vllm.exceptions import ModelNotFoundError
from vllm.v1.engine.engine_args import EngineArgs


def test_names() -> None:
    assert SERVED_MODEL.resolve_name(None) == SERVED_MODEL.resolve_name("") == "tiny"
    # huggingface_hub's names for none, of this version and of older ones
    assert SERVED_MODEL.resolve_name("dummy") == SERVED_MODEL.resolve_name("tgi") == "tiny"
    assert replace(SERVED_MODEL, names=("a", "dummy")).resolve_name("dummy") == "dummy"
    assert SERVED_MODEL.resolve_name("alias") == "alias"
    with pytest.raises(ModelNotFoundError, match="tiny, alias"):
        SERVED_MODEL.resolve_name("other")
    called = replace(SERVED_MODEL, aliases=("tiny.gguf",))
    assert called.resolve_name("tiny.gguf") == "tiny.gguf"
    with pytest.raises(ModelNotFoundError, match=r"tiny, alias, tiny\.gguf"):
        called.resolve_name("other")
    assert SERVED_MODEL.card("tiny").default_sampling_params is msgspec.UNSET
    cool = replace(SERVED_MODEL, default_sampling={"temperature": 0.3})
    assert cool.card("tiny").default_sampling_params == {"temperature": 0.3}


def test_facts_of_the_embedded_checkpoint() -> None:
    config = EngineArgs(served_model_name=["a", "b"], scheduling_policy="priority")
    served_model = make_served_model(config.create_vllm_config(), 4096, "auto")
    assert served_model.names == ("a", "b")
    assert (served_model.root, served_model.max_model_len, served_model.is_embedded) == (
        "deepseek-v4",
        4096,
        True,
    )
    assert served_model.has_priority
    card = served_model.card("b")
    assert card.id == "b"
    assert "embedded" in str(card.note)


def test_generation_config_sets_defaults_unless_told_otherwise() -> None:
    config = EngineArgs().create_vllm_config()
    config.model_config.generation_config = {
        **{"temperature": 0.6, "top_p": None, "repetition_penalty": 1.1},
        **{"eos_token_id": 1, "max_new_tokens": 9},
    }
    told, neutral = (make_served_model(config, 1, given) for given in ("auto", "vllm"))
    assert told.default_sampling == {"temperature": 0.6, "repetition_penalty": 1.1}
    assert neutral.default_sampling == {}
    assert (told.max_new_tokens, neutral.max_new_tokens) == (9, None)


def test_the_fingerprint_follows_what_changes_answers() -> None:
    prints = [
        make_served_model(args.create_vllm_config(), 1, "auto").fingerprint
        for args in (EngineArgs(), EngineArgs(), EngineArgs(seed=1), EngineArgs(dtype="bfloat16"))
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
