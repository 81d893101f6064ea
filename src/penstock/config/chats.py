"""Settings of chats from a YAML file and from the command line, all side by side: `mask_history: true`.

They are a file of their own, or the section `chat` of a run file. Their classes stay the only place where a name, its
type and its default are written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from penstock.config.document import Document, override, read_document
from penstock.config.models import check
from penstock.errors import ConfigError
from penstock.prepare.chat_settings import ChatSettings


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """What is read of a run file."""

    chat: ChatSettings
    """Settings of chats."""


def load_chat_settings(
    path: str | Path | None, assignments: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> ChatSettings:
    """Settings of chats; what is given later goes before what is given earlier.

    Args:
        path: A YAML file; None: no file.
        assignments: `mask_history=true`, in order.
        options: Values by their names.

    Raises:
        ConfigError: With the file, line and key of what is wrong.
    """
    document = read_document(path) if path is not None else Document("chats", {}, {})
    document = override(document, list(assignments))
    document = Document(document.name, {**document.values, **(options or {})}, document.lines, document.assigned)
    settings: ChatSettings = check(document, ChatSettings)
    if "template" not in document.values:
        raise ConfigError("settings of chats are given without their template; add --template, a .jinja file or auto")
    return settings


def load_chat_section(
    path: str | Path, assignments: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> ChatSettings:
    """Settings of chats from the section `chat` of a run file, of which nothing else is looked at.

    Args:
        path: The run file.
        assignments: `chat.mask_history=true`, or without `chat.`, in order.
        options: Values by their names, over those.

    Raises:
        ConfigError: With the file, line and key of what is wrong.
    """
    own = [text if text.startswith("chat.") else f"chat.{text}" for text in assignments]
    document = override(read_document(path), own)
    if "chat" not in document.values:
        raise ConfigError(
            f"{path}: no section chat; expected one with settings of chats, such as `chat: {{template: auto}}`"
        )
    section = Document(document.name, {"chat": document.values["chat"]}, document.lines, document.assigned)
    settings: _Section = check(section, _Section)
    return settings.chat.merge(options or {})
