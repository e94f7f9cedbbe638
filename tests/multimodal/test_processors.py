"""Prompt ids of chats with pictures against the processors of transformers, whole."""

from typing import Any

import pytest
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from tests.entrypoints.image_fixtures import family_of, image_input, picture, tokenizer_of
from vllm.tokenizers import ChatOptions, Tokenizer, make_chat_encoder
from vllm.v1.engine.shown_chats import find_pictures, show

_SHAPES = (
    *((96, 96), (64, 48), (300, 200), (33, 500), (500, 33)),
    *((640, 480), (17, 23), (224, 224), (1000, 700), (5, 5)),
)
_NAMES = {
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    "gemma4": {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
    "qwen3_5": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    },
}


def processor_of(name: str, tokenizer: Tokenizer) -> Any:
    """transformers' own, without the parts for films and sound."""
    own = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        extra_special_tokens=_NAMES[name],
        pad_token="<|im_end|>",
    )
    for attribute, text in _NAMES[name].items():
        setattr(own, attribute, text)
        setattr(own, f"{attribute}_id", own.convert_tokens_to_ids(text))
    if name == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 112, "width": 112})
        return Gemma3Processor(images, own, image_seq_length=4)
    if name == "gemma4":
        found = object.__new__(Gemma4Processor)
        found.image_processor = Gemma4ImageProcessorPil()
        for part in ("image", "boi", "eoi"):
            setattr(found, f"{part}_token", _NAMES[name][f"{part}_token"])
        found.audio_token = found.video_token = found.feature_extractor = None
        found.boa_token = found.eoa_token = ""
    else:
        edges = {"shortest_edge": 65_536, "longest_edge": 1_048_576}
        found = object.__new__(Qwen3VLProcessor)
        found.image_processor = Qwen2VLImageProcessorPil(
            size=edges, patch_size=16, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3
        )
        found.image_token, found.video_token = "<|image_pad|>", "<|video_pad|>"
        found.image_token_id = own.image_token_id
        found.video_token_id = None
    found.tokenizer, found.video_processor = own, None
    return found


@pytest.mark.parametrize("name", list(_NAMES))
def test_prompts_are_those_of_the_processor(name: str) -> None:
    """Ten shapes, one and several, in every role that the template allows."""
    tokenizer = tokenizer_of(name)
    family, processor = family_of(name, tokenizer), processor_of(name, tokenizer)
    images, encoder = image_input(family), make_chat_encoder({"model_type": name}, tokenizer)
    roles = encoder.image_roles(family.text.marker)
    assert "user" in roles
    pictures = [Image.fromarray(picture(i, *shape)) for i, shape in enumerate(_SHAPES)]
    for at, shown in enumerate([[one] for one in pictures] + [pictures[:3], pictures[4:7]]):
        for role in sorted(roles):
            parts: list[Any] = [{"type": "image_pil", "image_pil": one} for one in shown]
            parts.insert(at % 2, {"type": "text", "text": "What is this,\n\nand where?"})
            messages: list[Any] = [{"role": role, "content": parts}]
            if role != "user":
                messages.insert(0, {"role": "user", "content": "Hello"})
            known = [
                {**m, "content": [_known(p) for p in m["content"]]}
                if isinstance(m["content"], list)
                else m
                for m in messages
            ]
            text = processor.tokenizer.apply_chat_template(
                known,
                chat_template=tokenizer.chat_template,
                tokenize=False,
                add_generation_prompt=True,
            )
            expected = processor(text=[text], images=[shown], add_special_tokens=False)
            found = find_pictures(messages, images, encoder, from_program=True)
            chat = show(found, images.read_now(found.given), images)
            prompt = encoder.encode_chat(chat.messages, ChatOptions(images=chat.images))
            assert list(prompt.token_ids) == list(expected["input_ids"][0])


def _known(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part["type"] == "image_pil" else part
