"""``POST /rerank`` on its three paths, and ``POST /score``."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET
from starlette.requests import Request

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.protocol.responses import unix_now
from vllm.entrypoints.pooling.compute import PooledCall
from vllm.entrypoints.pooling.embeddings import make_vectors
from vllm.entrypoints.pooling.inputs import MAX_INPUTS, Cut, TokenizedText, tokenize_inputs
from vllm.entrypoints.pooling.pair_prompts import (
    Pair,
    PairPrompt,
    PairPrompts,
    cut_text,
    encode_pair,
    make_pair_prompts,
)
from vllm.entrypoints.pooling.protocol import (
    RankedDocument,
    RerankBody,
    RerankRequest,
    ScoreBody,
    ScoreItem,
    ScoreRequest,
)
from vllm.exceptions import UserInputError
from vllm.v1.request_options import PoolingParams

# How clients name the two sides of pairs.
_SIDES = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
# What checkpoints call the prompts of the two sides.
_QUERY_PROMPTS = ("query", "search_query")
_DOCUMENT_PROMPTS = ("document", "passage", "corpus", "search_document")


@dataclass(frozen=True, slots=True)
class Scores:
    """Those of pairs.

    Attributes:
        values: By pair.
        wording: Version of the words that the model was asked in; None: they are its own, or it
            was asked nothing.
    """

    values: list[float]
    wording: int | None = None


async def create_rerank(
    body: RerankRequest, raw_request: Request, context: ServingContext
) -> tuple[RerankBody, dict[str, str]]:
    """Return documents by how relevant they are to a query, and headers.

    Raises:
        UserInputError: The request is wrong.
        EngineError: The engine cannot serve it.
    """
    call = PooledCall.open("rerank-", body, raw_request, context)
    query = _read_text(body.query, "query")
    texts = _read_texts(body.documents, "documents")
    num_best = _read_top_n(body.top_n, len(texts))
    most = body.max_tokens_per_doc
    if most is not None and most < 1:
        raise UserInputError(f"max_tokens_per_doc={most} must be at least 1.", "max_tokens_per_doc")
    if most is not None:
        cut_all = [cut_text(text, most, context.tokenizer) for text in texts]
    else:
        cut_all = texts
    pairs = [Pair(query, text) for text in cut_all]
    cut = call.find_cut(body)
    found = await _score(call, pairs, _read_instruction(body), cut)
    scores = found.values
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    shows = body.return_documents is not False
    results = [
        RankedDocument(index, scores[index], _show(body.documents[index]) if shows else UNSET)
        for index in order[:num_best]
    ]
    meta = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1, "input_tokens": call.num_tokens},
    }
    answer = RerankBody(
        call.response_id, call.model, results, call.usage, meta, found.wording or UNSET
    )
    return answer, call.headers


async def create_score(
    body: ScoreRequest, raw_request: Request, context: ServingContext
) -> tuple[ScoreBody, dict[str, str]]:
    """Return how well the two texts of each pair go together, and headers.

    Raises:
        UserInputError: The request is wrong.
        EngineError: The engine cannot serve it.
    """
    call = PooledCall.open("score-", body, raw_request, context)
    pairs = _read_pairs(body)
    found = await _score(call, pairs, _read_instruction(body), call.find_cut(body))
    data = [ScoreItem(index, score) for index, score in enumerate(found.values)]
    answer = ScoreBody(
        call.response_id, unix_now(), call.model, data, call.usage, found.wording or UNSET
    )
    return answer, call.headers


async def _score(
    call: PooledCall, pairs: Sequence[Pair], instruction: str | None, cut: Cut
) -> Scores:
    """Return each pair's score, which others' do not change."""
    plan = call.context.vectors
    if plan.is_trained and plan.yes_no is None:
        if instruction is not None:
            raise UserInputError(
                "instruction is not available: this checkpoint compares vectors, and is asked "
                "nothing. Put it in front of the query.",
                "instruction",
            )
        return Scores(await _compare(call, pairs, cut))
    prompts = make_pair_prompts(call.context)
    encoded = await asyncio.gather(
        *(_encode(call.context, prompts, pair, instruction, cut) for pair in pairs)
    )
    texts = [TokenizedText(prompt.token_ids) for prompt in encoded]
    answer = encoded[0].answer
    found = await call.compute(texts, PoolingParams(logit_ids=[answer.yes, answer.no]))
    scores = [_to_probability(float(rows[0][0]) - float(rows[0][1])) for rows in found]
    return Scores(scores, prompts.wording)


async def _encode(
    context: ServingContext, prompts: PairPrompts, pair: Pair, instruction: str | None, cut: Cut
) -> PairPrompt:
    """Return a pair's prompt, made in a thread: templates are programs and texts are long."""
    num_chars = len(pair.query) + len(pair.document) + len(instruction or "")
    return await context.workers.run(
        num_chars,
        lambda _: encode_pair(prompts, pair, instruction, cut, context.tokenizer),
    )


def _to_probability(logit: float) -> float:
    """Return the logistic function; neither end overflows."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    grown = math.exp(logit)
    return grown / (1 + grown)


async def _compare(call: PooledCall, pairs: Sequence[Pair], cut: Cut) -> list[float]:
    """Return how alike the vectors of each pair are; an equal text is computed once."""
    queries = list(dict.fromkeys(pair.query for pair in pairs))
    documents = list(dict.fromkeys(pair.document for pair in pairs))
    plan = call.context.vectors
    texts: list[TokenizedText] = []
    for side, names in ((queries, _QUERY_PROMPTS), (documents, _DOCUMENT_PROMPTS)):
        prompt = next((plan.prompts[name] for name in names if name in plan.prompts), None)
        texts += await tokenize_inputs(side, prompt, cut, call.context, name="documents")
    vectors = await make_vectors(call, texts)
    of_query = dict(zip(queries, vectors, strict=False))
    of_document = dict(zip(documents, vectors[len(queries) :], strict=True))
    return [plan.compare(of_query[pair.query], of_document[pair.document]) for pair in pairs]


# ---- what clients send ---------------------------------------------------------------------------


def _read_text(given: Any, name: str) -> str:
    """Return the text of an entry: a text, or an object with one."""
    text = given.get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise UserInputError(
            f"{name} holds no text but {str(given)[:60]!r}: give a text, or an object with text.",
            name,
        )
    if not text:
        raise UserInputError(f"{name} is, or holds, an empty text: give one character.", name)
    return text


def _read_texts(given: Any, name: str) -> list[str]:
    if not isinstance(given, list):
        raise UserInputError(f"{name} must be a list of texts.", name)
    if not 1 <= len(given) <= MAX_INPUTS:
        raise UserInputError(
            f"{name} holds {len(given)} texts: give 1 to {MAX_INPUTS} of them.", name
        )
    return [_read_text(item, name) for item in given]


def _read_top_n(given: int | None, num_documents: int) -> int:
    if given is not None and given < 0:
        raise UserInputError(f"top_n={given} must be at least 1, or 0 for all.", "top_n")
    return given or num_documents


def _read_instruction(body: RerankRequest | ScoreRequest) -> str | None:
    given = {text for text in (body.instruction, body.instruct) if text is not None}
    if len(given) > 1:
        raise UserInputError("instruction and instruct differ: give one of them.", "instruction")
    return next(iter(given), None)


def _read_pairs(body: ScoreRequest) -> list[Pair]:
    for names in _SIDES:
        sides = [getattr(body, name) for name in names]
        if all(side is not None for side in sides):
            first, second = (
                _read_texts(side if isinstance(side, list) else [side], name)
                for side, name in zip(sides, names, strict=True)
            )
            if len(first) == 1:
                first *= len(second)
            if len(first) != len(second):
                raise UserInputError(
                    f"{names[0]} holds {len(first)} texts and {names[1]} {len(second)}: give one "
                    "for many, or as many.",
                    names[0],
                )
            return [Pair(*texts) for texts in zip(first, second, strict=True)]
    listed = ", or ".join(f"{one} and {other}" for one, other in _SIDES)
    raise UserInputError(f"Give the texts of pairs: {listed}.", "text_1")


def _show(document: Any) -> dict[str, Any]:
    """Return a document as it was sent."""
    return document if isinstance(document, dict) else {"text": document}
