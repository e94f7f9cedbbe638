"""Which Jinja template a checkpoint's chats take: the user's, or one of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm.exceptions import ConfigError

DEFAULT_TEMPLATE = "default"
# Checkpoints with several templates have this one for chats with tools.
TOOL_TEMPLATE = "tool_use"
_FILE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """The texts of templates.

    Attributes:
        default: For chats.
        tool_use: For chats with tools; None: the same.
    """

    default: str
    tool_use: str | None = None

    @property
    def for_tools(self) -> str:
        """The template that shows how tools and calls are written."""
        return self.tool_use or self.default


def choose_templates(given: str | None, own: Mapping[str, str]) -> ChatTemplates | None:
    """Return what chats are rendered with; None: the checkpoint has no template.

    Args:
        given: ``--chat-template``: a file, a folder with ``chat_template.jinja``, or the template
            itself; None: the checkpoint's.
        own: The checkpoint's templates by name.

    Raises:
        ConfigError: What is given cannot be read.
    """
    if given is not None:
        return ChatTemplates(read_template(given))
    if DEFAULT_TEMPLATE not in own:
        return None
    return ChatTemplates(own[DEFAULT_TEMPLATE], own.get(TOOL_TEMPLATE))


def read_template(path_or_text: str) -> str:
    """Return the template that ``--chat-template`` gives as a file, a folder or a text.

    Raises:
        ConfigError: No such file.
    """
    if "{" in path_or_text:
        return path_or_text
    path = Path(path_or_text).expanduser()
    try:
        path = path / _FILE if path.is_dir() else path
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template={path_or_text!r} cannot be read: {error}. Give a file, a folder with "
            f"{_FILE}, or the template itself."
        ) from error
