"""``POST /tokenize`` and ``POST /detokenize``."""

from typing import Any

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.pipeline.chat_task import ChatTask, prepare_chat
from vllm.entrypoints.openai.prompts import encode_texts
from vllm.entrypoints.openai.protocol.fields import CHAT, check_extra_fields
from vllm.entrypoints.openai.protocol.requests import DetokenizeRequest, TokenizeRequest
from vllm.entrypoints.openai.protocol.responses import DetokenizeBody, TokenizeBody
from vllm.entrypoints.openai.sampling import check_token_id
from vllm.exceptions import ModelNotFoundError, UserInputError
from vllm.tokenizers import ChatOptions
from vllm.tokenizers.chat_tools import parse_tool_choice, parse_tools


async def tokenize(body: TokenizeRequest, context: ServingContext) -> TokenizeBody:
    """Return the token ids of a text, or of a chat as the model would see it.

    Raises:
        UserInputError: The request is wrong.
    """
    context.served_model.resolve_name(body.model)
    check_extra_fields(body.model_extra, CHAT)
    if (body.prompt is None) == (body.messages is None):
        raise UserInputError("Give either prompt or messages.", "prompt")
    token_ids = await _token_ids(body, context)
    strings = None
    if body.return_token_strs:
        strings = [context.tokenizer.id_to_piece(token_id) for token_id in token_ids]
    return TokenizeBody(len(token_ids), context.served_model.max_model_len, token_ids, strings)


async def _token_ids(body: TokenizeRequest, context: ServingContext) -> list[int]:
    if body.prompt is not None:
        if body.tools is not None:
            raise UserInputError("tools needs messages: a prompt has no place for it.", "tools")
        with_special = body.add_special_tokens is not False
        texts, workers = [body.prompt], context.workers
        return (await encode_texts(context.tokenizer, texts, with_special, workers))[0]
    options = ChatOptions(
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        reasoning_effort=body.reasoning_effort,
        template_kwargs={
            **context.args.default_chat_template_kwargs,
            **(body.chat_template_kwargs or {}),
        },
        add_special_tokens=bool(body.add_special_tokens),
    )
    tools = parse_tools(body.tools)
    task = ChatTask(
        body.messages or [],
        options,
        tools,
        parse_tool_choice(None, tools),
        image_settings=body.mm_processor_kwargs,
    )
    return (await prepare_chat(task, context)).prompt.token_ids


def tokenizer_info(context: ServingContext) -> dict[str, Any]:
    """Return what clients need to know of the tokenizer that encode prompts through this server.

    Raises:
        ModelNotFoundError: The server was started without it.
    """
    if not context.args.enable_tokenizer_info_endpoint:
        raise ModelNotFoundError(
            "The tokenizer's settings are not told: start the server with "
            "--enable-tokenizer-info-endpoint."
        )
    return context.tokenizer.describe()


async def detokenize(body: DetokenizeRequest, context: ServingContext) -> DetokenizeBody:
    """Return the text of token ids, special tokens included.

    Raises:
        UserInputError: An id is outside the vocabulary.
    """
    context.served_model.resolve_name(body.model)
    check_extra_fields(body.model_extra)
    if not isinstance(body.tokens, list):
        raise UserInputError("tokens must be a list of token ids.", "tokens")
    for token_id in body.tokens:
        check_token_id(token_id, context.served_model.vocab_size, "tokens")
    return DetokenizeBody(context.tokenizer.decode(body.tokens))
