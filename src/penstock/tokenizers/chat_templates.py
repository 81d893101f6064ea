"""Chat templates next to a vocabulary: one, or several by name, of which transformers takes one.

Some models come with a list of named templates (`default`, `tool_use`, `rag`) in
`tokenizer_config.json`, or in the folder `additional_chat_templates`. transformers renders a
conversation with tools by `tool_use`, if it is there, and any other by `default`. `joined` makes
one template of the two, so that a dataset, a run, a server and an exported model have one text that
does the same.
"""

import io
from collections.abc import Mapping
from pathlib import Path

from penstock.core.errors import TokenizerError
from penstock.core.json_values import JsonMapping

CHAT_TEMPLATE = "chat_template.jinja"
TOOL_USE = "additional_chat_templates/tool_use.jinja"
_WITH_TOOLS = "tools is defined and tools is not none"


def joined(named: Mapping[str, str]) -> str | None:
    """One template that does what transformers does with several; None: there is none.

    Args:
        named: Name → text of a template.

    Raises:
        TokenizerError: None is named default or tool_use.
    """
    default, tool_use = named.get("default"), named.get("tool_use")
    if not named or tool_use is None or tool_use == default:
        if named and default is None:
            raise TokenizerError(
                f"its chat templates are named {', '.join(named)}; expected one named default "
                "or tool_use; give the template as a .jinja file"
            )
        return default
    if default is None:
        default = (
            "{{ raise_exception('this chat template is for conversations with tools; no other "
            "came with it') }}"
        )
    # Each begins on a line of its own, whose break our tag takes with it, and ends as a file does.
    tool_use, default = (text.removesuffix("\n") for text in (tool_use, default))
    return (
        f"{{% if {_WITH_TOOLS} %}}\n{tool_use}{_opening_behind(tool_use)} else %}}\n"
        f"{default}{_opening_behind(default)} endif %}}"
    )


def _opening_behind(text: str) -> str:
    """The beginning of a tag that leaves the white space before it."""
    return "{%+" if text.rpartition("\n")[2].isspace() else "{%"


def template_in(config: JsonMapping) -> str | None:
    """The chat template in a `tokenizer_config.json`; several are joined."""
    template = config.get("chat_template")
    if isinstance(template, list):
        return joined({entry["name"]: entry["template"] for entry in template})
    return (
        joined(template)
        if isinstance(template, dict)
        else template
        if isinstance(template, str)
        else None
    )


def template_beside(folder: Path, config: JsonMapping) -> str | None:
    """The chat template in a folder: in files of its own, else in its `tokenizer_config.json`,
    which is `config`.
    """
    own, tool_use = (
        _text((folder / name).read_bytes()) if (folder / name).is_file() else None
        for name in (CHAT_TEMPLATE, TOOL_USE)
    )
    if own is None:
        own = template_in(config)
    if tool_use is None:
        return own
    return joined({**({} if own is None else {"default": own}), "tool_use": tool_use})


def _text(content: bytes) -> str:
    return io.StringIO(content.decode(), newline=None).read()
