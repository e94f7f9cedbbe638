"""One HTTP request for vectors or scores on its way through the engine."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.engine_stream import EngineStream, Job
from vllm.entrypoints.openai.protocol.fields import check_extra_fields, ignored_fields_header
from vllm.entrypoints.openai.request_scope import (
    header_data_parallel_rank,
    leaves_nothing,
    make_response_id,
)
from vllm.entrypoints.openai.sampling import read_options
from vllm.entrypoints.pooling.inputs import Cut, TokenizedText
from vllm.entrypoints.pooling.protocol import CachedTokens, PooledBody, PooledUsage
from vllm.entrypoints.pooling.vectors import Rows, read_rows
from vllm.exceptions import EngineError, UnsupportedFeatureError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.request_options import PoolingParams, RequestOptions


@dataclass(slots=True)
class PooledCall:
    """A checked request, and what its texts cost.

    Attributes:
        response_id: The ``id`` of the response.
        model: The name the response carries.
        headers: Of the response, besides the usual ones.
        context: The server's.
        options: What its client says of it.
        num_tokens: Of all its texts so far.
        num_cached: Of those, found in the prefix cache.
    """

    response_id: str
    model: str
    headers: dict[str, str]
    context: ServingContext
    options: RequestOptions
    num_tokens: int = 0
    num_cached: int = 0

    @classmethod
    def open(
        cls, prefix: str, body: PooledBody, raw_request: Request, context: ServingContext
    ) -> "PooledCall":
        """Check what all routes for vectors check first.

        Args:
            prefix: Of the response's id.
            body: The request.
            raw_request: The same on the wire.
            context: The server's.

        Raises:
            ModelNotFoundError: The model is not served.
            UserInputError: A field asks for what is not served.
        """
        model = context.served_model.resolve_name(body.model)
        if not context.args.pooling:
            raise UnsupportedFeatureError(
                "This server makes no vectors and scores: it was started with --no-pooling."
            )
        headers = ignored_fields_header(check_extra_fields(body.model_extra, body.route))
        options = read_options(body).replace(
            data_parallel_rank=header_data_parallel_rank(raw_request),
            skip_cache_insert=leaves_nothing(raw_request, body),
            # A job that indexes must not drive chats out of the cache.
            is_spare=True,
        )
        options.check(has_priorities=context.served_model.has_priority)
        response_id = make_response_id(prefix, raw_request, body.request_id)
        return cls(response_id, model, headers, context, options)

    def find_cut(self, body: PooledBody, most: int | None = None) -> Cut:
        """Return what becomes of long texts.

        Args:
            body: The request.
            most: Tokens to keep by another field of its route; None: there is none.
        """
        limit = self.context.vectors.limit(self.context.served_model.max_model_len)
        wanted = body.truncate_prompt_tokens
        if wanted is None and most is not None:
            wanted = min(most, limit)
        return Cut.read(wanted, body.truncation_side, limit)

    async def compute(self, texts: Sequence[TokenizedText], wanted: PoolingParams) -> list[Rows]:
        """Return what is wanted of each text; all reach the engine together.

        Raises:
            VllmError: The engine refuses one, or fails.
        """
        unique = uuid.uuid4().hex[:8]
        options = self.options.replace(pooling=wanted)
        params = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
        jobs = [
            Job(f"{self.response_id}-{i}-{unique}", text.token_ids, params, options)
            for i, text in enumerate(texts)
        ]
        stream = EngineStream(self.context.engine, jobs, self.context.state)
        rows: dict[int, Rows] = {}
        await stream.start()
        try:
            async for item in stream.outputs():
                if item.output.pooled is not None:
                    rows[item.job_index] = read_rows(item.output.pooled)
                self.num_cached += item.output.num_cached_tokens or 0
        finally:
            await stream.close()
        if len(rows) < len(jobs):
            raise EngineError("The engine ended a request for vectors without any.")
        self.num_tokens += sum(len(text.token_ids) for text in texts)
        self.headers.update(stream.cache_status)
        return [rows[index] for index in range(len(jobs))]

    @property
    def usage(self) -> PooledUsage:
        """The tokens so far."""
        return PooledUsage(self.num_tokens, self.num_tokens, CachedTokens(self.num_cached))
