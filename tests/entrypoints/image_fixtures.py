"""Families of tiny models that see pictures: tokenizers, templates, files."""

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken

from tests.tokenizers.family_tokenizers import byte_level
from vllm.multimodal.decode import DecodeRules
from vllm.multimodal.families import (
    ImageFamily,
    gemma3_images,
    gemma4_images,
    qwen35_images,
)
from vllm.multimodal.fetch import ImageFetcher
from vllm.multimodal.image_input import ImageInput
from vllm.multimodal.reader import ImageReader
from vllm.tokenizers import Tokenizer

# As Qwen's, in short: every role shows pictures but the system, which raises.
QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% elif m.role == 'system' %}{{ raise_exception('System message cannot contain images.') }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Gemma 4's, in short: texts are trimmed, and results of calls show texts alone.
GEMMA4_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text | trim }}"
    "{% elif m.role != 'tool' and m.role != 'system' %}<|image|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA3_TEMPLATE = GEMMA4_TEMPLATE.replace("<|image|>", "<start_of_image>")
_SPECIALS = {
    "qwen3_5": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    "gemma4": ("<|image>", "<|image|>", "<image|>"),
    "gemma3": ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
}
_TEMPLATES = {"qwen3_5": QWEN_TEMPLATE, "gemma4": GEMMA4_TEMPLATE, "gemma3": GEMMA3_TEMPLATE}


def tokenizer_of(name: str) -> Tokenizer:
    """Return a tokenizer with a family's special tokens and chat template."""
    plain = byte_level()
    specials = [AddedToken(text, normalized=False) for text in _SPECIALS[name]]
    plain.backend.add_special_tokens(specials)
    return Tokenizer(plain.backend, {"eos_token": "<|im_end|>", "chat_template": _TEMPLATES[name]})


def family_of(name: str, tokenizer: Tokenizer) -> ImageFamily:
    """Return a family whose soft token is that of a tokenizer."""
    soft = tokenizer.token_to_id(_SPECIALS[name][1])
    assert soft is not None
    if name == "gemma3":
        return gemma3_images(soft, image_size=112, num_tokens=4)
    return gemma4_images(soft) if name == "gemma4" else qwen35_images(soft).for_cpu()


def image_input(family: ImageFamily, **settings: Any) -> ImageInput:
    """Return what pictures go through, with a server's settings."""
    hosts = settings.get("hosts", ())
    fetcher = settings.get("fetcher") or ImageFetcher(hosts)
    reader = ImageReader(
        family,
        family.sizes,
        "tower",
        rules=settings.get("rules", DecodeRules()),
        fetcher=fetcher,
        folder=settings.get("folder"),
        memo_bytes=settings.get("memo_bytes", 1 << 24),
    )
    return ImageInput(family, reader, settings.get("max_images", 4))


def picture(number: int = 0, width: int = 64, height: int = 48) -> Any:
    """Return pixels, others for each number."""
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


def file_of(pixels: Any, kind: str = "PNG", **options: Any) -> bytes:
    """Return a file of pixels."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def base64_of(pixels: Any, kind: str = "PNG", **options: Any) -> str:
    """Return a file of pixels as base64."""
    return base64.b64encode(file_of(pixels, kind, **options)).decode()


def url_of(pixels: Any, kind: str = "PNG", mime: str = "image/png", **options: Any) -> str:
    """Return a file of pixels as a data URL."""
    return f"data:{mime};base64,{base64_of(pixels, kind, **options)}"


def png_header(width: int, height: int) -> bytes:
    """Return a small PNG file whose header claims a size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 1000)
    chunks = [(b"IHDR", head), (b"IDAT", data), (b"IEND", b"")]
    framed = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def url_of_size(width: int, height: int) -> str:
    """Return a file that claims a size as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(png_header(width, height)).decode()}"
