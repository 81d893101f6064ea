"""Small templates that merge messages in one loop and write them in another, as those of Mistral's
models do.

Each is made from a `Style`; what it writes for a reply is told in plain Python by `reply_text`, so
that tests compare masks with that and not with another render.
"""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Style:
    """What one family of templates does."""

    version: str
    system: Literal["first", "last", "own"]
    """Before the first question, before the last one, or between markers of its own."""
    calls: Literal["", "json", "id and args", "args"] = "json"
    results: Literal["named", "by id", "content", "plain"] = "plain"
    tools: Literal["first", "last"] = "last"
    spaces: bool = False
    """As for vocabularies that put a space before a word."""
    joint: Literal["~", "+"] = "~"
    """How a call is put together; behind `|safe`, + escapes."""
    merging: Literal["flush", "replace"] = "flush"
    """Whether a group of messages is kept once the next begins, or grows where it is kept."""

    @property
    def name(self) -> str:
        return " ".join(
            [self.version, "spm" if self.spaces else "tekken", self.joint, self.merging]
        )


BASES = (
    Style("v1", "first", calls=""),
    Style("v1", "first", calls="", spaces=True),
    Style("v2", "last", results="named"),
    Style("v2", "last", results="named", spaces=True),
    Style("v3", "last", results="by id"),
    Style("v3", "last", results="by id", spaces=True),
    Style("v7", "own", results="content"),
    Style("v7", "own", results="content", spaces=True),
    Style("v11", "own", calls="id and args", results="content"),
    Style("v13", "own", calls="args", results="plain"),
    Style("v15", "own", calls="args", results="plain", tools="first"),
)
STYLES = {
    style.name: style
    for base in BASES
    for merging in ("flush", "replace")
    for joint in ("~", "+")
    if joint == "~" or base.calls
    for style in [replace(base, merging=merging, joint=joint)]
}

_FLUSH = """
{%- for m in kept.messages + [{'role': 'end'}] %}
{%- if m.role != kept.role or m.role in ['system', 'tool'] %}
  {%- if kept.role in ['system', 'tool'] %}{%- set kept.merged = kept.merged + kept.group %}
  {%- elif kept.group %}
    {%- set one = namespace(texts=[], calls=[]) %}
    {%- for g in kept.group %}
      {%- if g.content %}{%- set one.texts = one.texts + [g.content] %}{%- endif %}
      {%- if g.tool_calls %}{%- set one.calls = one.calls + g.tool_calls %}{%- endif %}
    {%- endfor %}
    {%- set text = one.texts | join('\n\n') %}
    {%- set kept.merged = kept.merged + [{'role': kept.role, 'content': text, 'tool_calls': one.calls}] %}
  {%- endif %}
  {%- set kept.group = [m] %}{%- set kept.role = m.role %}
{%- else %}{%- set kept.group = kept.group + [m] %}{%- endif %}
{%- endfor %}
"""  # noqa: E501
_REPLACE = """
{%- for m in kept.messages %}
{%- if kept.merged and kept.role == m.role and m.role not in ['system', 'tool'] %}
  {%- set last = kept.merged[-1] %}
  {%- set text = (last.content ~ '\n\n' ~ m.content) if last.content and m.content else last.content or m.content %}
  {%- set calls = last.tool_calls + (m.tool_calls or []) %}
  {%- set kept.merged = kept.merged[:-1] + [{'role': m.role, 'content': text, 'tool_calls': calls}] %}
{%- elif m.role in ['system', 'tool'] %}{%- set kept.merged = kept.merged + [m] %}
{%- else %}
  {%- set new = {'role': m.role, 'content': m.content or '', 'tool_calls': m.tool_calls or []} %}
  {%- set kept.merged = kept.merged + [new] %}
{%- endif %}
{%- set kept.role = m.role %}
{%- endfor %}
"""  # noqa: E501


def make_template(style: Style) -> str:
    """The text of a template."""
    space = " " if style.spaces else ""
    own = style.system == "own"
    lines = [
        "{{- bos_token }}",
        (
            "{%- set kept = namespace(system='', messages=[], merged=[], group=[], role='', "
            "users=0, seen=0) %}"
        ),
        "{%- for m in messages %}",
        "{%- if false %}" if own else "{%- if m.role == 'system' %}",
        "{%- set kept.system = (kept.system ~ '\n\n' if kept.system else '') ~ m.content %}",
        "{%- else %}{%- set kept.messages = kept.messages + [m] %}{%- endif %}{%- endfor %}",
        _FLUSH if style.merging == "flush" else _REPLACE,
        (
            "{%- for m in kept.merged %}{%- if m.role == 'user' %}{%- set kept.users = kept.users "
            "+ 1 %}"
        ),
        (
            "{%- if loop.index0 and loop.previtem.role == 'user' %}{{ raise_exception('two "
            "questions') }}{%- endif %}"
        ),
        "{%- endif %}{%- endfor %}",
        "{%- for m in kept.merged %}",
        (
            f"{{%- if m.role == 'system' %}}{{{{- '[SYSTEM_PROMPT]{space}' ~ m.content ~ "
            "'[/SYSTEM_PROMPT]' }}"
        ),
        "{%- elif m.role == 'user' %}{%- set kept.seen = kept.seen + 1 %}",
        _user(style, space),
        "{%- elif m.role == 'assistant' %}",
        _assistant(style, space),
        "{%- elif m.role == 'tool' %}",
        _result(style, space),
        "{%- else %}{{ raise_exception('no role ' ~ m.role) }}{%- endif %}",
        "{%- endfor %}",
    ]
    return "".join(lines)


def _user(style: Style, space: str) -> str:
    where = {"first": "kept.seen == 1", "last": "kept.seen == kept.users"}
    text = ""
    if style.calls:
        settings = (
            '[MODEL_SETTINGS]{"effort": "low"}[/MODEL_SETTINGS]' if style.version == "v15" else ""
        )
        text += (
            f"{{%- if tools and {where[style.tools]} %}}{{{{- '[AVAILABLE_TOOLS]{space}' ~ (tools "
            "| tojson) "
        )
        text += f"~ '[/AVAILABLE_TOOLS]' }}}}{{{{- '{settings}' }}}}{{%- endif %}}"
    text += (
        "{{- '[INST] ' }}"
        if style.version in ("v1", "v2", "v3")
        else "{{- '[INST]" + space + "' }}"
    )
    if style.system != "own":
        text += (
            f"{{%- if kept.system and {where[style.system]} %}}{{{{- kept.system ~ '\n\n' "
            "}}{%- endif %}"
        )
    text += "{{- m.content }}" + (
        "{{- ' [/INST]' }}" if style.version == "v1" else "{{- '[/INST]' }}"
    )
    # Only the oldest puts the space behind the question, and only where more follows.
    return text + (
        "{%- if not loop.last %}{{- ' ' }}{%- endif %}"
        if style.spaces and style.version == "v1"
        else ""
    )


def _assistant(style: Style, space: str) -> str:
    lead = space if style.version != "v1" else ""
    text = f"{{%- if m.content %}}{{{{- '{lead}' ~ m.content }}}}{{%- endif %}}"
    if style.calls == "json":
        parts = [
            '\'{"name": "\'',
            "call.function.name",
            '\'", "arguments": \'',
            "arguments",
            '\', "id": "\'',
        ]
        call = f" {style.joint} ".join([*parts, "call.id", "'\"}'"])
        text += (
            f"{{%- if m.tool_calls %}}{{{{- '[TOOL_CALLS]{space}[' }}}}{{%- for call in "
            "m.tool_calls %}"
        )
        text += (
            f"{_ARGUMENTS}{{{{- {call} }}}}{{%- if not loop.last %}}{{{{- ', ' }}}}{{%- endif %}}"
        )
        text += "{%- endfor %}{{- ']' }}{%- endif %}"
    elif style.calls:
        number = ["'[CALL_ID]'", "call.id"] if style.calls == "id and args" else []
        call = f" {style.joint} ".join(
            ["'[TOOL_CALLS]'", "call.function.name", *number, "'[ARGS]'", "arguments"]
        )
        text += f"{{%- for call in m.tool_calls %}}{_ARGUMENTS}{{{{- {call} }}}}{{%- endfor %}}"
    return text + "{{- eos_token }}"


_ARGUMENTS = (
    "{%- set arguments = call.function.arguments %}"
    "{%- if arguments is not string %}{%- set arguments = arguments | tojson | safe %}{%- endif %}"
)


def _result(style: Style, space: str) -> str:
    body = {
        "named": "'[' ~ ({'name': m.name, 'content': m.content} | tojson) ~ ']'",
        "by id": "({'content': m.content, 'call_id': m.tool_call_id} | tojson)",
        "content": "m.tool_call_id ~ '[TOOL_CONTENT]' ~ m.content",
        "plain": "m.content",
    }[style.results]
    return f"{{{{- '[TOOL_RESULTS]{space}' ~ {body} ~ '[/TOOL_RESULTS]' }}}}"


def reply_text(style: Style, group: Sequence[Mapping[str, Any]]) -> str:
    """What the model must write for some replies in a row, in the words of the style."""
    space = " " if style.spaces else ""
    words = "\n\n".join(message["content"] for message in group if message["content"])
    calls = [call for message in group for call in message.get("tool_calls", ())]
    text = (space + words if words else "") + _calls_text(style, calls, space)
    return text + "</s>"


def _calls_text(style: Style, calls: Sequence[Mapping[str, Any]], space: str) -> str:
    if not calls:
        return ""
    if style.calls == "json":
        return f"[TOOL_CALLS]{space}[" + ", ".join(_json_call(style, call) for call in calls) + "]"
    ids = {
        call["id"]: f"[CALL_ID]{call['id']}" if style.calls == "id and args" else ""
        for call in calls
    }
    return "".join(
        f"[TOOL_CALLS]{call['function']['name']}{ids[call['id']]}[ARGS]{_spelled(call['function']['arguments'])}"
        for call in calls
    )


def _json_call(style: Style, call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    # Only what |safe marks escapes what is added to it; text of the record is marked by nothing.
    escapes = style.joint == "+" and not isinstance(arguments, str)
    escaped = (lambda text: html.escape(text).replace("&quot;", "&#34;")) if escapes else str
    before, after = (
        f'{{"name": "{call["function"]["name"]}", "arguments": ',
        f', "id": "{call["id"]}"}}',
    )
    return escaped(before) + _spelled(arguments) + escaped(after)


def _spelled(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
