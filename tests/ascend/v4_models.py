"""V4-Flash's and V4-Pro's layer lists as configs, and the types of Ascend's pages."""

import json
from functools import cache

import torch

from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm_ascend.core.specs import PageDtypes

FLASH = [0, 0] + [4, 128] * 20 + [4]
PRO = [128, 128] + [4, 128] * 29 + [4]

DEVICE_PAGES = PageDtypes(rows=torch.bfloat16, index=torch.int8, state=torch.float32)
FLOAT_PAGES = PageDtypes(rows=torch.float32, index=None, state=torch.float32)
A5_PAGES = PageDtypes(rows=torch.float8_e4m3fn, index=torch.float8_e4m3fn, state=torch.float32)


@cache
def embedded_config() -> dict:
    path = resolve_checkpoint("deepseek-v4").path
    with open(f"{path}/config.json", encoding="utf-8") as file:
        return json.load(file)


def v4_config(ratios: list[int]) -> DeepseekV4Config:
    """The published head sizes over a list of compress ratios, with one MTP layer."""
    raw = dict(embedded_config())
    raw.update(
        num_hidden_layers=len(ratios),
        compress_ratios=ratios,
        head_dim=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        num_nextn_predict_layers=1,
        sliding_window=128,
    )
    return DeepseekV4Config.from_dict(raw)
