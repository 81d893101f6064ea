"""Settings of chats from a YAML file and from the command line, all side by side: `mask_history: true`.

Their classes stay the only place where a name, its type and its default are written.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config.document import Document, override, read_document
from penstock.config.models import check, field_names
from penstock.errors import ConfigError
from penstock.prepare.chat_settings import GROUPS, OF_TEMPLATE, ChatSettings, chat_names


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
    for name in document.values:
        if name not in chat_names():
            close = difflib.get_close_matches(name, chat_names(), 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(chat_names())}"
            raise ConfigError(f"{document.where((name,))}: unknown key; {hint}")
    if "template" not in document.values:
        raise ConfigError("settings of chats are given without their template; add --template, a .jinja file or auto")
    groups = {name: check(_only(document, field_names(kind)), kind) for name, kind in GROUPS.items()}
    own = {name: document.values[name] for name in OF_TEMPLATE if name in document.values}
    return ChatSettings(**own, **groups)


def _only(document: Document, names: Sequence[str]) -> Document:
    values = {name: value for name, value in document.values.items() if name in names}
    return Document(document.name, values, document.lines, document.assigned)
