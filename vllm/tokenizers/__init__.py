"""Text to token ids and back, and chats to prompts. Torch-free; nothing here needs transformers."""

from vllm.tokenizers.chat_encoder import ChatEncoder, ChatOptions, ChatPrompt, make_chat_encoder
from vllm.tokenizers.tokenizer import Tokenizer

__all__ = ["ChatEncoder", "ChatOptions", "ChatPrompt", "Tokenizer", "make_chat_encoder"]
