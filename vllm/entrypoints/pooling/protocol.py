"""Bodies that clients of vectors and scores send, and those that they get."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, StrictBool, WithJsonSchema

from vllm.entrypoints.openai.protocol.fields import POOLING
from vllm.entrypoints.openai.protocol.requests import (
    EngineRequest,
    Many,
    PromptField,
    Text,
    Whole,
)

Embedding = list[float] | str


class PooledBody(EngineRequest):
    """Fields that all routes for vectors and scores share; null means the default everywhere."""

    route: ClassVar[str] = POOLING

    truncate_prompt_tokens: Whole | None = Field(
        None, description="Keep this many of a text's tokens; -1: all that fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where tokens go that are too many; right unless told otherwise."
    )


class _VectorBody(PooledBody):
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32", "float16"] | None = Field(
        None, description="Of numbers in base64."
    )
    endianness: Literal["native", "little", "big"] | None = Field(
        None, description="Of numbers in base64; little unless told otherwise."
    )
    add_special_tokens: StrictBool | None = Field(
        None, description="Whether to put around texts what the checkpoint does; true."
    )
    use_activation: StrictBool | None = Field(
        None, description="false: vectors do not get the length 1."
    )
    prompt_name: Text | None = Field(
        None, description="Which of the checkpoint's prompts to put in front of texts."
    )
    prompt: Text | None = Field(None, description="Or the prompt itself.")


class EmbeddingRequest(_VectorBody):
    """``POST /v1/embeddings``: ``input``, or one chat or several as ``messages``."""

    input: PromptField | None = None
    messages: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})] = None
    dimensions: Whole | None = Field(None, description="Keep so many numbers of each vector.")


class PoolingRequest(_VectorBody):
    """``POST /pooling``."""

    input: PromptField | None = None
    task: Text | None = Field(None, description="token_embed: a vector for each token; embed.")
    dimensions: Whole | None = None


class EmbedRequest(PooledBody):
    """``POST /v2/embed``, as Cohere's clients send it."""

    texts: Many[Text] | None = None
    inputs: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})] = None
    input_type: Text | None = Field(
        None, description="search_query, search_document, classification or clustering."
    )
    embedding_types: Many[Text] | None = None
    output_dimension: Whole | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: Whole | None = None


class RerankRequest(PooledBody):
    """``POST /rerank``, ``/v1/rerank`` and ``/v2/rerank``."""

    query: Any = None
    documents: Annotated[Any, WithJsonSchema({"type": "array"})] = None
    top_n: Whole | None = Field(None, description="So many of the best alone; 0: all.")
    return_documents: StrictBool | None = None
    max_tokens_per_doc: Whole | None = None
    instruction: Text | None = None
    instruct: Text | None = Field(None, description="The same by another name.")


class ScoreRequest(PooledBody):
    """``POST /score``: pairs of texts, by one of four pairs of names."""

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None
    instruction: Text | None = None
    instruct: Text | None = None


# ---- answers -------------------------------------------------------------------------------------


class CachedTokens(msgspec.Struct):
    """Where prompt tokens came from."""

    cached_tokens: int


class PooledUsage(msgspec.Struct):
    """Tokens of one HTTP request."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class EmbeddingItem(msgspec.Struct):
    """One vector."""

    index: int
    embedding: Embedding
    object: str = "embedding"


class EmbeddingBody(msgspec.Struct):
    """``POST /v1/embeddings``."""

    id: str
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: PooledUsage
    object: str = "list"


class PoolingItem(msgspec.Struct):
    """The vectors of one text, one for each token, or its one."""

    index: int
    data: list[list[float]] | Embedding
    object: str = "pooling"


class PoolingBody(msgspec.Struct):
    """``POST /pooling``."""

    id: str
    created: int
    model: str
    data: list[PoolingItem]
    usage: PooledUsage
    object: str = "list"


class EmbedBody(msgspec.Struct):
    """``POST /v2/embed``."""

    id: str
    embeddings: dict[str, list[Any]]
    meta: dict[str, Any]
    texts: list[str] | UnsetType = UNSET
    response_type: str = "embeddings_by_type"


class RankedDocument(msgspec.Struct):
    """A document and how relevant it is.

    Attributes:
        document: As it was sent; a text stands under ``text``.
    """

    index: int
    relevance_score: float
    document: dict[str, Any] | UnsetType = UNSET


class RerankBody(msgspec.Struct):
    """Answers all three rerank routes: Jina's fields beside Cohere's."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PooledUsage
    meta: dict[str, Any]
    prompt_format_version: int | UnsetType = UNSET
    object: str = "list"


class ScoreItem(msgspec.Struct):
    """The score of one pair."""

    index: int
    score: float
    object: str = "score"


class ScoreBody(msgspec.Struct):
    """``POST /score``."""

    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: PooledUsage
    prompt_format_version: int | UnsetType = UNSET
    object: str = "list"
