"""``POST /v1/embeddings``, ``/v2/embed`` and ``/pooling``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.pipeline.chat_task import ChatTask, prepare_chat
from vllm.entrypoints.openai.protocol.responses import unix_now
from vllm.entrypoints.pooling.compute import PooledCall
from vllm.entrypoints.pooling.inputs import Cut, TokenizedText, split_inputs, tokenize_inputs
from vllm.entrypoints.pooling.protocol import (
    EmbedBody,
    Embedding,
    EmbeddingBody,
    EmbeddingItem,
    EmbeddingRequest,
    EmbedRequest,
    PoolingBody,
    PoolingItem,
    PoolingRequest,
)
from vllm.entrypoints.pooling.vectors import (
    Rows,
    Vector,
    encode_base64,
    normalise,
    to_signed_bits,
    to_signed_bytes,
    to_unsigned_bits,
    to_unsigned_bytes,
)
from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.tokenizers import ChatOptions
from vllm.v1.request_options import PoolingParams

# What clients of Cohere's API call texts, and what checkpoints call the prompts for them.
_PROMPTS_OF_INPUTS: Mapping[str, Sequence[str]] = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
_COHERE_TYPES: Mapping[str, Callable[[Vector], Any]] = {
    "float": lambda vector: vector.tolist(),
    "base64": encode_base64,
    "int8": to_signed_bytes,
    "uint8": to_unsigned_bytes,
    "binary": to_signed_bits,
    "ubinary": to_unsigned_bits,
}
_TASKS = ("token_embed", "embed")


async def create_embeddings(
    body: EmbeddingRequest, raw_request: Request, context: ServingContext
) -> tuple[EmbeddingBody, dict[str, str]]:
    """Return a vector for each text, and headers.

    Raises:
        UserInputError: The request is wrong.
        EngineError: The engine cannot serve it.
    """
    call = PooledCall.open("embd-", body, raw_request, context)
    context.vectors.check_size(body.dimensions, "dimensions")
    cut = call.find_cut(body)
    if (body.input is None) == (body.messages is None):
        raise UserInputError("Give either input or messages.", "input")
    if body.messages is not None:
        texts = await _tokenize_chats(body.messages, cut, context)
    else:
        texts = await _tokenize(body, cut, context)
    vectors = await make_vectors(
        call, texts, body.dimensions, normalises=body.use_activation is not False
    )
    data = [EmbeddingItem(i, _encode(vector, body)) for i, vector in enumerate(vectors)]
    answer = EmbeddingBody(call.response_id, unix_now(), call.model, data, call.usage)
    return answer, call.headers


async def create_pooling(
    body: PoolingRequest, raw_request: Request, context: ServingContext
) -> tuple[PoolingBody, dict[str, str]]:
    """Return a vector for each token of each text, or one for each text; and headers.

    Raises:
        UserInputError: The request is wrong.
        EngineError: The engine cannot serve it.
    """
    call = PooledCall.open("pool-", body, raw_request, context)
    task = body.task or _TASKS[0]
    if task not in _TASKS:
        raise UnsupportedFeatureError(
            f"task={task!r} is not supported: no model here has a head for it. Use one of "
            f"{', '.join(_TASKS)}.",
            "task",
        )
    context.vectors.check_size(body.dimensions, "dimensions")
    texts = await _tokenize(body, call.find_cut(body), context)
    data: list[PoolingItem]
    if task == "embed":
        vectors = await make_vectors(
            call, texts, body.dimensions, normalises=body.use_activation is not False
        )
        data = [PoolingItem(i, _encode(vector, body)) for i, vector in enumerate(vectors)]
    else:
        if body.dimensions is not None:
            raise UserInputError(
                "dimensions is not available for the vectors of tokens: leave it out, or use "
                "task=embed.",
                "dimensions",
            )
        rows_of = await call.compute(texts, PoolingParams(all_rows=True))
        found = [context.vectors.project(rows) for rows in rows_of]
        if context.vectors.normalises and body.use_activation is not False:
            found = [np.stack([normalise(row) for row in rows]) for rows in found]
        data = [PoolingItem(i, _encode_rows(rows, body)) for i, rows in enumerate(found)]
    answer = PoolingBody(call.response_id, unix_now(), call.model, data, call.usage)
    return answer, call.headers


async def create_embed(
    body: EmbedRequest, raw_request: Request, context: ServingContext
) -> tuple[EmbedBody, dict[str, str]]:
    """Return vectors in the types that a client of Cohere's API asks for, and headers.

    Raises:
        UserInputError: The request is wrong.
        EngineError: The engine cannot serve it.
    """
    call = PooledCall.open("embd-", body, raw_request, context)
    plan = context.vectors
    types = list(dict.fromkeys(body.embedding_types or ["float"]))
    for kind in types:
        if kind not in _COHERE_TYPES:
            raise UnsupportedFeatureError(
                f"embedding_types holds {kind!r}: supported are {', '.join(_COHERE_TYPES)}.",
                "embedding_types",
            )
    plan.check_size(body.output_dimension, "output_dimension")
    size = body.output_dimension or plan.default_size or plan.size
    if size % 8 and not {"binary", "ubinary"}.isdisjoint(types):
        raise UserInputError(
            f"output_dimension={size} is no multiple of 8, which bits need: use another, or float.",
            "output_dimension",
        )
    given = _read_cohere_texts(body)
    prompt = _find_cohere_prompt(body.input_type, context)
    cut = _find_cohere_cut(body, call)
    texts = await tokenize_inputs(split_inputs(given, "texts"), prompt, cut, context, name="texts")
    vectors = await make_vectors(call, texts, body.output_dimension)
    made = {kind: [_COHERE_TYPES[kind](vector) for vector in vectors] for kind in types}
    meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": call.num_tokens}}
    return EmbedBody(call.response_id, made, meta, given), call.headers


async def make_vectors(
    call: PooledCall,
    texts: Sequence[TokenizedText],
    size: int | None = None,
    *,
    normalises: bool = True,
) -> list[Vector]:
    """Return a vector for each text, as the model's plan says."""
    plan = call.context.vectors
    found = await call.compute(texts, plan.params)
    return [
        plan.cut(plan.make_vector(rows, text.num_prompt_tokens, normalises=normalises), size)
        if normalises
        else plan.make_vector(rows, text.num_prompt_tokens, normalises=False)[:size]
        for rows, text in zip(found, texts, strict=True)
    ]


async def _tokenize(
    body: EmbeddingRequest | PoolingRequest, cut: Cut, context: ServingContext
) -> list[TokenizedText]:
    plan = context.vectors
    if body.prompt is not None and body.prompt_name is not None:
        raise UserInputError("Give either prompt or prompt_name.", "prompt_name")
    if body.input is None:
        raise UserInputError("input is required: a text, token ids, or a list of either.", "input")
    return await tokenize_inputs(
        split_inputs(body.input),
        plan.find_prompt(body.prompt_name, body.prompt, "prompt_name"),
        cut,
        context,
        adds_special_tokens=body.add_special_tokens is not False,
    )


async def _tokenize_chats(given: Any, cut: Cut, context: ServingContext) -> list[TokenizedText]:
    """Render chats, as they stand: without what opens an answer."""
    chats = given if isinstance(given, list) and given and isinstance(given[0], list) else [given]
    texts: list[TokenizedText] = []
    for chat in chats:
        if not isinstance(chat, list) or not all(isinstance(item, dict) for item in chat):
            raise UserInputError(
                "messages must be a list of messages, or a list of such lists.", "messages"
            )
        task = ChatTask(chat, ChatOptions(add_generation_prompt=False), takes_images=False)
        texts.append(TokenizedText(cut.apply((await prepare_chat(task, context)).prompt.token_ids)))
    return texts


def _read_cohere_texts(body: EmbedRequest) -> list[str]:
    """Return the texts of the two forms that there are."""
    if (body.texts is None) == (body.inputs is None):
        raise UserInputError("Give either texts or inputs.", "texts")
    if body.texts is not None:
        return body.texts
    if not isinstance(body.inputs, list):
        raise UserInputError("inputs must be a list of objects with content.", "inputs")
    texts: list[str] = []
    for entry in body.inputs:
        parts = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(parts, list) or not all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
            for part in parts
        ):
            raise UnsupportedFeatureError(
                "inputs holds an entry that is no text: only texts are served, as "
                '{"content": [{"type": "text", "text": "..."}]}.',
                "inputs",
            )
        texts.append("".join(part["text"] for part in parts))
    return texts


def _find_cohere_prompt(input_type: str | None, context: ServingContext) -> str | None:
    if input_type is None:
        return context.vectors.find_prompt(None, None, "input_type")
    if input_type not in _PROMPTS_OF_INPUTS:
        raise UnsupportedFeatureError(
            f"input_type={input_type!r} is not supported: use one of "
            f"{', '.join(_PROMPTS_OF_INPUTS)}.",
            "input_type",
        )
    named = {name.lower(): text for name, text in context.vectors.prompts.items()}
    found = (named[name] for name in _PROMPTS_OF_INPUTS[input_type] if name in named)
    return next(found, None)


def _find_cohere_cut(body: EmbedRequest, call: PooledCall) -> Cut:
    """Return what becomes of long texts: Cohere's API cuts their ends unless told otherwise."""
    if body.truncate_prompt_tokens is not None or body.truncation_side is not None:
        return call.find_cut(body, body.max_tokens)
    if body.max_tokens is not None and body.max_tokens < 1:
        raise UserInputError(f"max_tokens={body.max_tokens} must be at least 1.", "max_tokens")
    cut = call.find_cut(body, body.max_tokens)
    if body.truncate == "NONE":
        return Cut(cut.kept or cut.limit)
    side = "left" if body.truncate == "START" else "right"
    return Cut(cut.limit, cut.kept or cut.limit, side)


def _encode(vector: Vector, body: EmbeddingRequest | PoolingRequest) -> Embedding:
    if body.encoding_format != "base64":
        numbers: list[float] = vector.tolist()
        return numbers
    return encode_base64(vector, body.embed_dtype or "float32", body.endianness or "little")


def _encode_rows(
    rows: Rows, body: EmbeddingRequest | PoolingRequest
) -> list[list[float]] | Embedding:
    if body.encoding_format != "base64":
        numbers: list[list[float]] = rows.tolist()
        return numbers
    return encode_base64(rows, body.embed_dtype or "float32", body.endianness or "little")
