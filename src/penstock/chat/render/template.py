"""Chat templates: Jinja text with the names of control tokens that it may write.

A template comes from a file, from a tokenizer folder, or as text. `render` traces the origin of
each character; `render_plain` gives only the text. Compiling costs a few milliseconds, once per
template.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, final
from weakref import WeakKeyDictionary

import jinja2

from penstock.chat.render.environment import ChatEnvironment, TracingEnvironment, compile_template
from penstock.chat.render.traced_text import GIVEN, Run, Traced, lay_over, trace, trace_messages
from penstock.core.errors import ConfigError, RecordError
from penstock.core.json_files import parse_json
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.chat_templates import template_beside

_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_OWN = Path(__file__).parent / "templates"
_MARKUP = re.compile(r"\|\s*(?:safe|e|escape|forceescape|xmlattr|urlize)\b")
"""Filters after which Jinja escapes what `+`, `%` and similar operators add; tracing does not see
that.
"""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_REASONING_NAMES = frozenset(_REASONING)
_PARTS = re.compile(r"""\[\s*['"]type['"]\s*\]|\.type\b|['"]type['"]\s*,""")
"""How templates tell the parts of a content apart."""
NONE = "none"
"""Name of the template for records that need none: segments and token ids."""
_NO_TEMPLATE = "{{ raise_exception('the template is none, and this record needs one') }}"
_own_templates: "WeakKeyDictionary[Tokenizer, Template]" = WeakKeyDictionary()
LABELS = ("role", "name", "tool_call_id", "type")
"""Fields of a message that are not part of what it says."""


@final
@dataclass(frozen=True, kw_only=True)
class Template:
    """A chat template that renders conversations and traces each character to its message."""

    source: str
    name: str = "template"
    variables: JsonMapping = field(default_factory=dict)
    """Its variables besides the conversation: bos_token, eos_token, …, and the user's own
    (enable_thinking).
    """
    now: datetime | None = None
    """The time that `strftime_now` writes; None: the time of rendering, so renders differ from day
    to day.
    """

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything that changes its output."""
        content = json.dumps(
            [self.source, dict(self.variables), str(self.now)], sort_keys=True, default=str
        )
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @cached_property
    def reads_parts(self) -> bool:
        """Whether it looks at the types of parts; then a content that is one text may be lost
        without an error.
        """
        return _PARTS.search(self.source) is not None

    @cached_property
    def words(self) -> frozenset[str]:
        """All words in it, such as the names of fields that it reads."""
        return frozenset(re.findall(r"\w+", self.source))

    @cached_property
    def may_escape(self) -> bool:
        """Whether it has filters after which Jinja escapes text."""
        return _MARKUP.search(self.source) is not None

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.source, self.name, dict(self.variables), self.now)

    @cached_property
    def _traced(self) -> jinja2.Template:
        return self._compile(TracingEnvironment(self._clock))

    @cached_property
    def _plain(self) -> jinja2.Template:
        return self._compile(ChatEnvironment(self._clock))

    def _clock(self) -> datetime:
        return self.now or datetime.now()

    def _compile(self, environment: ChatEnvironment) -> jinja2.Template:
        try:
            return compile_template(self.source, environment)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"chat template {self.name}, line {error.lineno}: {error.message}"
            ) from error

    def render(
        self,
        messages: Sequence[JsonMapping],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> "Rendered":
        """Render a conversation, with the origin of each character.

        Args:
            messages: In the OpenAI layout.
            tools: JSON schemas of functions.
            add_generation_prompt: Also write the beginning of the assistant's next turn.
            variables: Variables for this render; they override those of the template.

        Raises:
            RecordError: The template refuses or cannot render the conversation; has the template's
                own message.
        """
        plain = [_with_reasoning(message) for message in messages]
        traced = trace_messages(plain)
        given = {name: trace(value, GIVEN, name) for name, value in variables.items()}
        traced_tools = None if tools is None else trace(tools, GIVEN, "tools")
        plain_given = (plain, tools, add_generation_prompt, variables)
        try:
            text = Traced(
                self._run(self._traced, traced, traced_tools, add_generation_prompt, given)
            )
        except RecordError:
            # Without tracing the same failure has a message that names none of our classes.
            self._run(self._plain, *plain_given)
            raise
        if self.may_escape:
            return self._as_written(text, self._run(self._plain, *plain_given))
        return Rendered(text=str.__str__(text), runs=text._runs)

    def render_plain(
        self,
        messages: Sequence[JsonMapping],
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = False,
        **variables: object,
    ) -> str:
        """The text only; arguments and errors as in `render`."""
        plain = [_with_reasoning(message) for message in messages]
        return self._run(self._plain, plain, tools, add_generation_prompt, variables)

    def _as_written(self, traced: Traced, plain: str) -> "Rendered":
        """The plain render's text, with the runs of the traced one; the two differ where Jinja
        escaped text.
        """
        if str.__eq__(traced, plain):
            return Rendered(text=plain, runs=traced._runs)
        runs = lay_over(traced, traced._runs, plain)
        if runs is None:
            raise RecordError(
                f"chat template {self.name}: the origin of its text is unknown, because Jinja "
                "rewrites what is added after |safe or |e; write a ~ b there instead of a + "
                "b, or remove the filter"
            )
        return Rendered(text=plain, runs=runs, escaped=len(plain) - len(traced))

    def usual_head(self, role: str) -> str:
        """Text before that of a user or assistant that is not the first message; empty if
        unknown.
        """
        return self._usual_heads.get(role, "")

    @cached_property
    def _usual_heads(self) -> Mapping[str, str]:
        said = [
            {"role": role, "content": text}
            for role, text in (("user", "q"), ("assistant", "a"), ("user", "r"))
        ]
        parts = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            for message in said
        ]
        for messages in (said, parts):
            try:
                rendered = self.render(messages)
            except RecordError:
                continue
            return {"assistant": _head(rendered, 1), "user": _head(rendered, 2)}
        return {}

    def _run(
        self,
        template: jinja2.Template,
        messages: Sequence[object],
        tools: Any,
        prompt: bool,
        variables: JsonMapping,
    ) -> str:
        given = {**self.variables, "documents": None, **variables}
        tools = list(tools) if tools is not None else None
        own = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
        if clash := own.keys() & given.keys():
            raise RecordError(
                f"chat template {self.name}: {min(clash)} cannot be a variable of the "
                "template; rename it"
            )
        environment = template.environment
        names = {**environment.globals, **given, **own}
        try:
            # As Template.render does, without copying the environment's names one by one.
            context = environment.context_class(environment, names, template.name, template.blocks)
            return environment.concat(template.root_render_func(context))
        except RecursionError as error:
            raise RecordError(
                f"chat template {self.name} fails: a macro of it calls itself without end, for a "
                "value that it does not expect, such as the type of a tool's argument"
            ) from error
        except Exception as error:
            # Names of our classes become those of plain ones.
            reason = re.sub(
                "Traced(Dict|List|)", lambda found: found[1].lower() or "str", str(error).strip()
            )
            reason = reason or type(error).__name__
            kind = (
                "refuses the conversation" if isinstance(error, jinja2.TemplateError) else "fails"
            )
            raise RecordError(f"chat template {self.name} {kind}: {reason}") from error


class Lost(NamedTuple):
    """Something that a template did not write, or wrote in another way."""

    message: int
    where: Literal["content", "stop", "arguments", "result"]
    """An empty content; a reply that goes on after a text that ends it; a call; the content of a
    tool's result.
    """
    text: str
    """A sentence about it."""
    weight: int = 1
    """How bad it is, for the choice among forms that all lose something."""


class Words(NamedTuple):
    """A stretch of the text that comes from a message."""

    begin: int
    end: int
    message: int
    field: str
    owner: int | None
    """Message in the turn of which the template's loop wrote it; negative or None: outside all
    turns.
    """


@cache
def is_label(field: str) -> bool:
    """Whether a field of a message is a label, such as its role, and not part of what it says."""
    path = field.split(".")
    if path[0] == "content":
        return len(path) == 3 and path[2] == "type"
    return path[-1] in LABELS and "arguments" not in path[:-1]


@final
@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with the origin of every character."""

    text: str
    runs: tuple[Run, ...]
    """In order; their lengths add up to the length of the text."""
    escaped: int = 0
    """Number of characters that Jinja added by escaping text after |safe or |e."""
    lost: tuple[Lost, ...] = ()
    """Calls, results and empty contents that are not written as they are; see `structure.py`."""

    @cached_property
    def words(self) -> tuple[Words, ...]:
        """The text of messages, in order, without roles and other labels."""
        found, at = [], 0
        for length, message, path, _, owner, _ in self.runs:
            if message >= 0 and not is_label(path):
                found.append(Words(at, at + length, message, path, owner))
            at += length
        return tuple(found)

    @cached_property
    def reasoning_ends(self) -> Mapping[int, Sequence[int]]:
        """Message → ends of the stretches of its reasoning, in order."""
        ends: dict[int, list[int]] = {}
        for words in self.words:
            if words.field == "reasoning_content":
                ends.setdefault(words.message, []).append(words.end)
        return ends

    @cached_property
    def first_words(self) -> Mapping[int, int]:
        """Message → first character of its text."""
        return {words.message: words.begin for words in reversed(self.words)}


def _head(rendered: Rendered, message: int) -> str:
    """Text of a template in the turn of a message, before the text of the message."""
    head, at = "", 0
    for length, origin, path, _, owner, _ in rendered.runs:
        if origin == message and not is_label(path):
            return head
        head += rendered.text[at : at + length] if owner == message else ""
        at += length
    return ""


def load_template(
    source: str | Path, *, tokenizer: Tokenizer | None = None, **variables: object
) -> Template:
    """Load a chat template.

    Args:
        source: A `.jinja` file; a folder as models ship it (`chat_template.jinja`,
            `tokenizer_config.json`); the text of a template; the name of a family in
            `template_names`, for a plain template that comes with penstock; or "none", for records
            that need none (segments, token ids).
        tokenizer: Gives the names of BOS, EOS and padding if the folder does not.
        variables: Variables for the template, such as enable_thinking.

    Raises:
        ConfigError: There is no template, or it is not valid Jinja.
    """
    text, name, config = _find(source)
    if text is None:
        raise ConfigError(
            f"{source}: no chat template there; give a .jinja file, a tokenizer folder that "
            f"has one, or one of {', '.join(template_names())}"
        )
    template = Template(
        source=text, name=name, variables={**_token_names(tokenizer, config), **variables}
    )
    _ = template._plain
    return template


def own_template(
    tokenizer: Tokenizer, *, source: str | None = None, **variables: object
) -> Template:
    """The chat template that came with a tokenizer.

    Args:
        tokenizer: It also gives the names of BOS, EOS and padding.
        source: The text of another one, which came with it as well; None: the tokenizer's.
        variables: Variables for the template.

    Raises:
        ConfigError: There is none, or it is not valid Jinja.
    """
    if source is None and not variables:
        if tokenizer not in _own_templates:
            _own_templates[tokenizer] = own_template(tokenizer, source=_source_of(tokenizer))
        return _own_templates[tokenizer]
    source = _source_of(tokenizer) if source is None else source
    named = {**_token_names(tokenizer, {}), **variables}
    # The name that a template from that folder would have.
    name = tokenizer.name.rpartition("/")[2]
    template = Template(source=source, name=name, variables=named)
    _ = template._plain
    return template


def _source_of(tokenizer: Tokenizer) -> str:
    """The text of a tokenizer's own template."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer {tokenizer.name} has no chat template of its own; set template to "
            "a .jinja file, a tokenizer folder that has one, or one of "
            f"{', '.join(template_names())}"
        )
    return tokenizer.chat_template


def template_names() -> tuple[str, ...]:
    """Families that have a template here, for text conversations without tools."""
    return tuple(sorted(path.stem for path in _OWN.glob("*.jinja")))


def _find(source: str | Path) -> tuple[str | None, str, JsonMapping]:
    """(text of the template or None, its name, tokenizer_config.json)."""
    if isinstance(source, str) and ("{%" in source or "{{" in source):
        return source, "given as text", {}
    if source == NONE and not Path(source).exists():
        return _NO_TEMPLATE, NONE, {}
    path = Path(source)
    if source in template_names() and not path.exists():
        return (_OWN / f"{source}.jinja").read_text(encoding="utf-8"), str(source), {}
    if path.is_file() and path.suffix != ".json":
        return path.read_text(encoding="utf-8"), path.name, {}
    folder = path.parent if path.is_file() else path
    config_path = path if path.is_file() else folder / "tokenizer_config.json"
    config = (
        parse_json(config_path.read_bytes(), config_path, ConfigError)
        if config_path.is_file()
        else {}
    )
    return template_beside(folder, config), path.name, config


def _token_names(tokenizer: Tokenizer | None, config: JsonMapping) -> dict[str, str]:
    """bos_token and other names, from the folder or from the tokenizer."""
    named = {}
    if tokenizer is not None:
        texts = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
        ids = {
            "bos_token": tokenizer.bos_id,
            "eos_token": tokenizer.eos_id,
            "pad_token": tokenizer.pad_id,
        }
        named = {name: texts[token_id] for name, token_id in ids.items() if token_id in texts}
        content = tokenizer.source_bytes.get("tokenizer_config.json")
        if not config and content is not None:
            config = json.loads(content)
    for name in _NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if value is not None:
            named[name] = value
    return named


def _with_reasoning(message: JsonMapping) -> JsonMapping:
    """The message with reasoning under both names that templates read, as transformers does."""
    if _REASONING_NAMES.isdisjoint(message):
        return message
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _rebuild(source: str, name: str, variables: JsonObject, now: datetime | None) -> Template:
    return Template(source=source, name=name, variables=variables, now=now)
