"""Pictures from a chat's bytes to its answer, on tiny models: transformers' own answers."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken

from tests.entrypoints.image_fixtures import picture, url_of
from tests.model_executor.towers.checkpoints import (
    IMAGE_ID,
    VOCAB_SIZE,
    reference_logits,
    write_checkpoint,
)
from tests.tokenizers.family_tokenizers import byte_level
from vllm import LLM, SamplingParams
from vllm.entrypoints.cli.main import main
from vllm.exceptions import ConfigError, UnsupportedFeatureError, UserInputError
from vllm.model_executor.towers.tower import Tower
from vllm.multimodal.decode import resize
from vllm.multimodal.image_input import ImageInput
from vllm.multimodal.reader import GivenImage
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.image_setup import make_image_input

_UNIT = 16
_QUESTION = {"type": "text", "text": "What is this, and where?"}
_OTHER = {"type": "text", "text": "How many?"}
_GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
# Soft token, what opens a picture, what closes it; and what a template writes for one.
_TOKENS = {
    "qwen35": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "gemma4v": ("<|image|>", "<|image>", "<image|>"),
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
}
_SHOWN = {
    "qwen35": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma4v": "<|image|>",
    "gemma3": "<start_of_image>",
}


@dataclass
class Seeing:
    """A model, and its reference."""

    family: str
    llm: LLM
    reference: Any

    def chat(self, *parts: Any, **fields: Any) -> Any:
        (output,) = self.llm.chat(
            [{"role": "user", "content": list(parts)}], _GREEDY, use_tqdm=False, **fields
        )
        return output

    def check(self, output: Any, *pictures: Any) -> None:
        """Compare an answer with the reference's, token by token."""
        family = self.llm.llm_engine.vllm_config.model_config.image_family
        sizes = family.sizes.with_settings(_SMALL.get(self.family, {}))
        resized = []
        for pixels in pictures:
            size = sizes.fit(pixels.shape[1], pixels.shape[0])
            resized.append(resize(pixels, size, sizes.resample))
        answer = output.outputs[0]
        ids = [*output.prompt_token_ids, *answer.token_ids]
        logits = reference_logits(self.family, self.reference, ids, resized)
        rows = logits[len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
        assert rows.argmax(-1).tolist() == list(answer.token_ids)
        own = [
            row[token].logprob for row, token in zip(answer.logprobs, answer.token_ids, strict=True)
        ]
        expected = rows.max(-1).values
        torch.testing.assert_close(torch.tensor(own), expected, atol=5e-3, rtol=0)


_SMALL: dict[str, dict[str, Any]] = {"gemma4v": {"max_soft_tokens": 70}}


def write_seeing(family: str, folder: Path, **sizes: Any) -> Any:
    reference = write_checkpoint(family, folder, **sizes)
    backend = byte_level().backend
    soft, before, after = _TOKENS[family]
    names = {IMAGE_ID: soft, IMAGE_ID + 1: before, IMAGE_ID + 3: after}
    for token_id in range(backend.get_vocab_size(), VOCAB_SIZE):
        name = names.get(token_id, f"<|unused{token_id}|>")
        backend.add_special_tokens([AddedToken(name, normalized=False)])
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
        "{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
        "{% else %}" + _SHOWN[family] + "{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert Tokenizer.from_folder(folder).token_to_id(soft) == IMAGE_ID
    return reference


@pytest.fixture(scope="module", params=["qwen35", "gemma4v", "gemma3"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp(request.param)
    reference = write_seeing(request.param, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = LLM(
            str(folder),
            block_size=_UNIT,
            max_model_len=2048,
            max_num_seqs=4,
            kv_cache_memory_bytes=64 << 20,
            mm_processor_kwargs=_SMALL.get(request.param, {}),
        )
        with llm:
            yield Seeing(request.param, llm, reference)


def _pil(pixels: Any) -> dict[str, Any]:
    return {"type": "image_pil", "image_pil": Image.fromarray(pixels)}


def _forget(seeing: Seeing) -> None:
    assert seeing.llm.reset_prefix_cache()


def test_answers_are_transformers(seeing: Seeing) -> None:
    one, two = picture(1, 200, 150), picture(2, 90, 260)

    alone = seeing.chat(_pil(one), _QUESTION)
    both = seeing.chat(_QUESTION, _pil(one), _pil(two), _OTHER)

    seeing.check(alone, one)
    seeing.check(both, one, two)


def test_hits_reach_into_the_picture_and_end_where_pictures_part(seeing: Seeing) -> None:
    pixels = picture(3, 200, 150)
    changed = pixels.copy()
    changed[40:60, 40:60] ^= 255
    _forget(seeing)
    first = seeing.chat(_pil(pixels), _QUESTION)
    soft = first.prompt_token_ids.index(IMAGE_ID)
    count = first.prompt_token_ids.count(IMAGE_ID)

    again = seeing.chat(_pil(pixels), _QUESTION)
    second = seeing.chat(
        {"type": "image_url", "image_url": {"url": url_of(pixels, "BMP", "image/png")}}, _OTHER
    )
    other = seeing.chat(_pil(changed), _QUESTION)

    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == (len(first.prompt_token_ids) - 1) // _UNIT * _UNIT
    assert second.num_cached_tokens == (soft + count) // _UNIT * _UNIT
    # Equal ids, another picture.
    assert other.prompt_token_ids == first.prompt_token_ids
    assert other.num_cached_tokens <= soft
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    seeing.check(second, pixels)
    seeing.check(other, changed)
    _forget(seeing)
    cold = seeing.chat(_pil(pixels), _OTHER)
    assert cold.num_cached_tokens == 0
    assert cold.outputs[0].token_ids == second.outputs[0].token_ids


def test_prompts_and_chats_ask_the_same(seeing: Seeing) -> None:
    pixels = picture(4, 130, 130)
    chat = seeing.chat(_pil(pixels), _QUESTION)
    text = (
        f"<|im_start|>user\n{_SHOWN[seeing.family]}{_QUESTION['text']}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokenizer = seeing.llm.get_tokenizer()
    assert tokenizer is not None
    data = {"image": [np.asarray(pixels)]}
    prompts: list[Any] = [
        {"prompt": text, "multi_modal_data": data},
        {"prompt_token_ids": tokenizer.encode(text), "multi_modal_data": data},
        {"prompt_token_ids": chat.prompt_token_ids, "multi_modal_data": {"image": pixels}},
    ]

    outputs = seeing.llm.generate(prompts, _GREEDY, use_tqdm=False)

    for output in outputs:
        assert output.prompt_token_ids == chat.prompt_token_ids
        assert output.outputs[0].token_ids == chat.outputs[0].token_ids
    for wrong in (
        {"prompt": "none", "multi_modal_data": data},
        {"prompt": text, "multi_modal_data": {"image": "file.png"}},
        {"prompt": text, "multi_modal_data": {"video": [1]}},
        {"prompt": text, "multi_modal_data": [pixels]},
        {"prompt": text, "multi_modal_data": data, "multi_modal_uuids": {"image": ["a", "b"]}},
        {"prompt": text, "multi_modal_data": data, "mm_processor_kwargs": {"x": 1}},
        # A marker's id without a picture.
        {"prompt_token_ids": chat.prompt_token_ids},
    ):
        with pytest.raises(UserInputError):
            seeing.llm.generate([wrong], _GREEDY, use_tqdm=False)


def test_a_model_without_its_eyes_says_why(seeing: Seeing) -> None:
    folder = seeing.llm.llm_engine.vllm_config.model_config.path

    def image_input(**fields: Any) -> ImageInput:
        return make_image_input(EngineArgs(model=str(folder), **fields).create_vllm_config())

    assert image_input().reader is not None
    for fields, why in (
        ({"language_model_only": True}, "--language-model-only"),
        ({"limit_mm_per_prompt": {"image": 0}}, "image=0"),
    ):
        given = [GivenImage("messages[0].content[0]")]
        with pytest.raises(UnsupportedFeatureError, match=why):
            image_input(**fields).check(given)
    with pytest.raises(ConfigError, match="--mm-processor-kwargs"):
        image_input(mm_processor_kwargs={"crops": 3})


def test_asyncllm_reads_pictures_too(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    if seeing.family != "qwen35":
        pytest.skip("the same code for all")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    pixels = picture(8, 100, 70)
    expected = seeing.chat(_pil(pixels), _QUESTION)
    text = (
        f"<|im_start|>user\n{_SHOWN[seeing.family]}{_QUESTION['text']}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    folder = seeing.llm.llm_engine.vllm_config.model_config.path
    args = EngineArgs(
        str(folder),
        block_size=_UNIT,
        max_model_len=2048,
        kv_cache_memory_bytes=64 << 20,
    )

    async def ask(prompt: Any, **options: Any) -> Any:
        async for output in engine.generate(prompt, _GREEDY, str(len(seen)), **options):
            last = output
        seen.append(last)
        return last

    async def run() -> None:
        first = await ask({"prompt": text, "multi_modal_data": {"image": pixels}})
        assert first.prompt_token_ids == expected.prompt_token_ids
        assert first.outputs[0].token_ids == expected.outputs[0].token_ids
        again = await ask({"prompt": text, "multi_modal_data": {"image": [url_of(pixels)]}})
        assert again.num_cached_tokens > 0
        salted = {"prompt": text, "multi_modal_data": {"image": pixels}}
        assert (await ask(salted, cache_salt="mine")).num_cached_tokens == 0
        broken = {"image": url_of(pixels)[:222]}
        with pytest.raises(UserInputError, match=r"multi_modal_data.image\[0\] cannot be decoded"):
            await ask({"prompt": text, "multi_modal_data": broken})

    seen: list[Any] = []
    engine = AsyncLLM.from_engine_args(args)
    try:
        asyncio.run(run())
    finally:
        engine.shutdown()


@pytest.mark.slow
def test_several_workers_answer_as_one(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a tower of its own, and the first says when a picture is made."""
    if seeing.family != "gemma3":
        pytest.skip("both ways: the harder case")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    pixels = picture(9, 100, 70)
    folder = seeing.llm.llm_engine.vllm_config.model_config.path
    with LLM(
        str(folder),
        block_size=_UNIT,
        max_model_len=2048,
        kv_cache_memory_bytes=64 << 20,
        tensor_parallel_size=2,
    ) as llm:
        workers = Seeing(seeing.family, llm, seeing.reference)
        workers.check(workers.chat(_pil(pixels), _QUESTION), pixels)
        again = workers.chat(_pil(pixels), _OTHER)
        assert again.num_cached_tokens > 0
        workers.check(again, pixels)


def test_a_prompt_with_pictures_is_rendered(
    seeing: Seeing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = picture(10, 200, 150)
    chat = seeing.chat(_pil(pixels), _QUESTION)
    parts = [{"type": "image_url", "image_url": {"url": url_of(pixels)}}, _QUESTION]
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    folder = str(seeing.llm.llm_engine.vllm_config.model_config.path)
    settings = json.dumps(_SMALL.get(seeing.family, {}))
    flags = ["render", "--model", folder, "--mm-processor-kwargs", settings, str(body)]
    assert main([*flags, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["num_tokens"] == len(chat.prompt_token_ids)
    (place,) = shown["images"]
    assert place["token"] == chat.prompt_token_ids.index(IMAGE_ID)
    assert place["num_tokens"] == chat.prompt_token_ids.count(IMAGE_ID)
    assert main(flags) == 0
    assert f"tokens {place['token']} to" in capsys.readouterr().out


def test_a_picture_seen_before_costs_no_tower_after_a_restart(
    seeing: Seeing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seeing.family != "gemma4v":
        pytest.skip("the same code for all")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    encoded: list[int] = []
    encode = Tower.encode

    def count(self: Tower, *args: Any) -> Any:
        encoded.append(1)
        return encode(self, *args)

    monkeypatch.setattr(Tower, "encode", count)
    pixels = picture(11, 100, 70)
    answers, counts = [], []
    for salt in (None, None, "mine"):
        encoded.clear()
        with LLM(
            str(seeing.llm.llm_engine.vllm_config.model_config.path),
            block_size=_UNIT,
            max_model_len=1024,
            kv_cache_memory_bytes=64 << 20,
            mm_processor_kwargs=_SMALL[seeing.family],
            mm_encoder_cache_dir=tmp_path / "rows",
        ) as llm:
            asked = {
                "prompt": f"{_SHOWN[seeing.family]}What?",
                "multi_modal_data": {"image": pixels},
                "cache_salt": salt,
            }
            (output,) = llm.generate([asked], _GREEDY, use_tqdm=False)  # type: ignore[list-item]
            answers.append([row[t].logprob for row, t in _rows(output)])
        counts.append(len(encoded))
    # Who finds a picture learns that somebody sent it: a salt has its own.
    assert counts == [1, 0, 1]
    assert answers == [answers[0]] * 3


def _rows(output: Any) -> Any:
    answer = output.outputs[0]
    return zip(answer.logprobs, answer.token_ids, strict=True)
