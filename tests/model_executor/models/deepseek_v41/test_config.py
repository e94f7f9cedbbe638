"""config.json of DeepSeek-V4.1: whose entries a layer reads, and what is refused by name."""

from typing import Any

import pytest

from tests.model_executor.models.deepseek_v41.release import RELEASE
from tests.model_executor.models.deepseek_v41.tiny import tiny_v41
from vllm.exceptions import ConfigError
from vllm.model_executor.models.deepseek_v41.config import DeepseekV41Config


def test_the_release() -> None:
    config = DeepseekV41Config.from_dict(RELEASE)
    plans = config.layers
    assert [plan.source for plan in plans] == ([-1] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20)
    assert [i for i, plan in enumerate(plans) if plan.source == i] == [2, 8, 14, 20]
    assert [i for i, plan in enumerate(plans) if plan.chooser == i] == [
        *(2, 8, 14, 20, 24, 28, 32, 36)
    ]
    # Between layer 20 and the next chooser its own choice is read, which is of all entries.
    assert [plan.candidates for plan in plans[20:]] == ["names", *[""] * 3, *["within"] * 16]
    assert config.cut == 20
    assert (config.placeholder_ids, config.bos_token_id, config.eos_token_id) == ((129264,), 0, 1)
    assert config.rms_norm_eps == 1e-20
    assert config.compress_rope.yarn is not None
    assert config.main_rope.yarn is None
    assert config.ngrams is not None
    assert config.ngrams.rows_per_token == 24


def test_the_text_may_stand_at_the_top() -> None:
    flat = {**RELEASE["text_config"], **{k: v for k, v in RELEASE.items() if k != "text_config"}}
    assert DeepseekV41Config.from_dict(flat) == DeepseekV41Config.from_dict(RELEASE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, -1]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 2]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1]}, "compress_ratios"),
        ({"compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1, 1, 1]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 0, 2, 2, 1, 1, 1, 1, 1]}, "index_source_layer_ids"),
        ({"kv_source_layer_ids": [2, 3, 4, 5]}, "index_source_layer_ids"),
        ({"kv_source_layer_ids": [4, 2, 5]}, "kv_source_layer_ids"),
        ({"index_source_layer_ids": [2, 4, 5, 12]}, "index_source_layer_ids"),
        ({"candidate_source_layer_id": 6}, "candidate_source_layer_id"),
        ({"candidate_source_layer_id": 2}, "candidate_source_layer_id"),
        ({"gate_temp": 0.5}, "gate_temp"),
        ({"num_hash_layers": 3}, "num_hash_layers"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"engram_num_embeddings": [1, 2]}, "engram_num_embeddings"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size"),
        ({"engram_pad_token_id": 96}, "engram_pad_token_id"),
        ({"engram_compressed_vocab_size": 97}, "engram_compressed_vocab_size"),
        ({"engram_compressed_vocab_size": None}, "engram_compressed_vocab_size"),
        ({"engram_layer_ids": [1, 10]}, "engram_layer_ids"),
        ({"model_type": "deepseek_v4"}, "model_type"),
    ],
)
def test_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DeepseekV41Config.from_dict(tiny_v41(**change))
