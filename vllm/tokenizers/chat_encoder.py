"""Which chat encoder a checkpoint gets."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.exceptions import ConfigError, UserInputError
from vllm.tokenizers.chat_messages import ChatEncoder, ChatOptions, ChatPrompt
from vllm.tokenizers.deepseek_v4_encoding import DeepseekV4ChatEncoder, resolve_thinking
from vllm.tokenizers.deepseek_v32_encoding import DeepseekV32ChatEncoder
from vllm.tokenizers.deepseek_v41_encoding import DeepseekV41ChatEncoder
from vllm.tokenizers.described_tools import WriteCalls
from vllm.tokenizers.gemma4_encoding import Gemma4ChatEncoder, is_gemma4
from vllm.tokenizers.literal_text import LiteralText
from vllm.tokenizers.mistral_template import find_mistral_template
from vllm.tokenizers.template_files import ChatTemplates, choose_templates, read_template
from vllm.tokenizers.tokenizer import Tokenizer

__all__ = [
    "ChatEncoder",
    "ChatOptions",
    "ChatPrompt",
    "check_chat_flags",
    "find_templates",
    "make_chat_encoder",
]

_ENCODER_OF_MODEL_TYPE: Mapping[str, type[DeepseekV4ChatEncoder]] = {
    "deepseek_v32": DeepseekV32ChatEncoder,
    "deepseek_v4": DeepseekV4ChatEncoder,
    "deepseek_v41": DeepseekV41ChatEncoder,
    "deepseek_v41_text": DeepseekV41ChatEncoder,
}


class NoChatEncoder:
    """Stands for a checkpoint without a chat format: completions work, chats are refused."""

    ignores_tools = False

    def image_roles(self, marker: str) -> frozenset[str]:
        """Return none."""
        return frozenset()

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> ChatPrompt:
        """Refuse the chat.

        Raises:
            UserInputError: Always.
        """
        raise UserInputError(
            "This model's checkpoint has no chat template: start the server with --chat-template, "
            "or use /v1/completions.",
            "messages",
        )


def make_chat_encoder(
    checkpoint_config: Mapping[str, Any],
    tokenizer: Tokenizer,
    chat_template: str | None = None,
    *,
    allows_special_tokens: bool = False,
    keeps_billing_line: bool = False,
    write_calls: WriteCalls | None = None,
) -> ChatEncoder:
    """Choose how a checkpoint's chats become prompts.

    The user's template wins; then the encoding built in for the model type, unless that yields to a
    template; then the checkpoint's own template; then Mistral's or Gemma 4's format, where the
    vocabulary has its tokens. Without any, chats are refused request by request.

    Args:
        checkpoint_config: The content of config.json.
        tokenizer: The checkpoint's.
        chat_template: ``--chat-template``: see ``choose_templates``.
        allows_special_tokens: Whether special tokens spelled in messages become special; else they
            stay text.
        keeps_billing_line: Whether a system text keeps the line of ``billing_line``.
        write_calls: Tells tools in the system text where a template ignores them; None: nothing
            does.

    Raises:
        ConfigError: The template is absent or broken, or the tokenizer lacks needed tokens.
    """
    literal_text = None if allows_special_tokens else LiteralText(tokenizer)
    built_in = _ENCODER_OF_MODEL_TYPE.get(checkpoint_config.get("model_type", ""))
    templates = find_templates(checkpoint_config, tokenizer, chat_template)
    if templates is None and built_in is not None:
        return built_in(tokenizer, literal_text, keeps_billing_line=keeps_billing_line)
    if templates is None and is_gemma4(checkpoint_config, tokenizer):
        return Gemma4ChatEncoder(tokenizer, literal_text, keeps_billing_line=keeps_billing_line)
    if templates is None:
        return NoChatEncoder()
    # jinja2 costs start-up time that DeepSeek-V4 need not pay.
    from vllm.tokenizers.chat_template import JinjaChatEncoder  # noqa: PLC0415

    return JinjaChatEncoder(
        tokenizer,
        templates.default,
        literal_text,
        templates.tool_use,
        keeps_billing_line=keeps_billing_line,
        write_calls=write_calls,
    )


def find_templates(
    checkpoint_config: Mapping[str, Any], tokenizer: Tokenizer, chat_template: str | None = None
) -> ChatTemplates | None:
    """Return the templates that chats are rendered with; None: a built-in format, or none at all.

    Args:
        checkpoint_config: The content of config.json.
        tokenizer: The checkpoint's.
        chat_template: ``--chat-template``: see ``choose_templates``.

    Raises:
        ConfigError: The template cannot be read.
    """
    built_in = _ENCODER_OF_MODEL_TYPE.get(checkpoint_config.get("model_type", ""))
    yields = built_in is None or (built_in.yields_to_template and bool(tokenizer.chat_templates))
    if chat_template is None and not yields:
        return None
    templates = choose_templates(chat_template, tokenizer.chat_templates)
    if templates is None and (known := find_mistral_template(tokenizer)) is not None:
        templates = ChatTemplates(known)
    return templates


def check_chat_flags(
    checkpoint_config: Mapping[str, Any],
    chat_template_path: str | None,
    default_template_kwargs: Mapping[str, Any],
) -> None:
    """Refuse chat settings that would fail later, before a model is loaded for them.

    Args:
        checkpoint_config: The content of config.json.
        chat_template_path: ``--chat-template``: a file, or the template itself.
        default_template_kwargs: ``--default-chat-template-kwargs``.

    Raises:
        ConfigError: The template is absent or broken, or the model's own chat format does not know
            an argument.
    """
    if chat_template_path is not None:
        # As above: only those who give a template wait for jinja2.
        from vllm.tokenizers.chat_template import compile_template  # noqa: PLC0415

        compile_template(read_template(chat_template_path))
        return
    built_in = _ENCODER_OF_MODEL_TYPE.get(checkpoint_config.get("model_type", ""))
    # What a template beside the checkpoint knows is its own affair.
    if built_in is not None and not built_in.yields_to_template:
        try:
            resolve_thinking(ChatOptions(template_kwargs=default_template_kwargs), built_in.format)
        except UserInputError as error:
            raise ConfigError(f"--default-chat-template-kwargs: {error}") from error
