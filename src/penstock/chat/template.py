"""Chat templates: Jinja text with the names of control tokens that it may write.

A template comes from a file, from a tokenizer folder as models ship it, or as text. Rendering is traced (`render`), or
plain for those who need only the text. Costs: compiling takes some milliseconds, once a template.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

import jinja2

from penstock.chat.environment import ChatEnvironment, TracingEnvironment, compile_template
from penstock.chat.escaping import lay_over
from penstock.chat.traced import GIVEN, Run, Traced
from penstock.chat.writing import trace
from penstock.errors import ConfigError, RecordError
from penstock.tokenizers import Tokenizer, template_in

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OWN = Path(__file__).parent / "templates"
_MARKUP = re.compile(r"\|\s*(?:safe|e|escape|forceescape|xmlattr|urlize)\b")
"""Filters behind which Jinja escapes what `+`, `%` and the like add, which tracing does not see."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_REASONING_NAMES = frozenset(_REASONING)
LABELS = ("role", "name", "tool_call_id", "type")
"""Fields of a message that are not its words."""


@final
@dataclass(frozen=True, kw_only=True)
class Template:
    """A chat template that renders conversations and knows where each character comes from."""

    source: str
    name: str = "template"
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What it sees besides the conversation: bos_token, eos_token, …, and the user's own (enable_thinking)."""
    now: datetime | None = None
    """What `strftime_now` tells; None: the time of rendering, and then renders differ from day to day."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of all that changes what it renders."""
        content = json.dumps([self.source, dict(self.variables), str(self.now)], sort_keys=True, default=str)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
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
            raise ConfigError(f"chat template {self.name}, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> "Rendered":
        """Render a conversation once, with the origin of each character.

        Args:
            messages: As the template sees them (OpenAI layout).
            tools: JSON schemas of functions.
            add_generation_prompt: Also write what opens the assistant's next turn.
            variables: More of the template's own, over those of the template.

        Raises:
            RecordError: The template refuses the conversation, or cannot render it; the message is the template's.
        """
        plain = [_with_reasoning(message) for message in messages]
        traced = [trace(message, number) for number, message in enumerate(plain)]
        given = {name: trace(value, GIVEN, name) for name, value in {"tools": tools, **variables}.items()}
        plain_given = (plain, tools, add_generation_prompt, variables)
        try:
            text = Traced(self._run(self._traced, traced, given.pop("tools"), add_generation_prompt, given))
        except RecordError:
            # The words of the same failure without tracing, which name no class of ours.
            self._run(self._plain, *plain_given)
            raise
        if _MARKUP.search(self.source):
            return self._as_written(text, self._run(self._plain, *plain_given))
        return Rendered(text=str.__str__(text), runs=text._runs)

    def render_plain(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The text alone; arguments and errors are those of `render`."""
        plain = [_with_reasoning(message) for message in messages]
        return self._run(self._plain, plain, tools, add_generation_prompt, variables)

    def _as_written(self, traced: Traced, plain: str) -> "Rendered":
        """A traced text as the plain render writes it, with what Jinja escaped there."""
        if str.__eq__(traced, plain):
            return Rendered(text=plain, runs=traced._runs)
        runs = lay_over(traced, traced._runs, plain)
        if runs is None:
            raise RecordError(
                f"chat template {self.name}: the origin of its text cannot be told, as Jinja rewrites what is added "
                "behind |safe or |e; write a ~ b there in place of a + b, or leave the filter out"
            )
        return Rendered(text=plain, runs=runs, escaped=len(plain) - len(traced))

    def _run(
        self, template: jinja2.Template, messages: list[Any], tools: Any, prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        given = {**self.variables, "documents": None, **variables}
        tools = list(tools) if tools is not None else None
        own = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
        if clash := own.keys() & given.keys():
            raise RecordError(f"chat template {self.name}: {min(clash)} cannot be given as a variable of the template")
        environment = template.environment
        names = {**environment.globals, **given, **own}
        try:
            # What Template.render does, without copying the environment's names one by one through its maps.
            context = environment.context_class(environment, names, template.name, template.blocks)
            return environment.concat(template.root_render_func(context))
        except RecursionError:
            raise
        except Exception as error:
            reason = re.sub("Traced(Dict|List|)", _plain_name, str(error).strip()) or type(error).__name__
            kind = "refuses the conversation" if isinstance(error, jinja2.TemplateError) else "fails"
            raise RecordError(f"chat template {self.name} {kind}: {reason}") from error


class Words(NamedTuple):
    """A stretch of a message's words in the text."""

    begin: int
    end: int
    message: int
    field: str
    owner: int | None
    """In which turn of the template's loop it was written; negative or None for none."""


@cache
def is_label(field: str) -> bool:
    """Whether a field of a message is not of its words: its role, and the like."""
    return field.rpartition(".")[2] in LABELS


@final
@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with the origin of every character."""

    text: str
    runs: tuple[Run, ...]
    """In order; their lengths add up to that of the text."""
    escaped: int = 0
    """How many characters longer Jinja made the text by escaping what is added behind |safe or |e."""

    @cached_property
    def words(self) -> tuple[Words, ...]:
        """The words of messages in the text, in order; roles and other labels are none."""
        found, at = [], 0
        for length, message, path, _, owner, _ in self.runs:
            if message >= 0 and not is_label(path):
                found.append(Words(at, at + length, message, path, owner))
            at += length
        return tuple(found)


def load_template(source: str | Path, *, tokenizer: Tokenizer | None = None, **variables: Any) -> Template:
    """Load a chat template.

    Args:
        source: A `.jinja` file; a folder as models ship it (`chat_template.jinja`, `tokenizer_config.json`); the text
            of a template itself; or the name of a family (`template_names`), whose plain form we wrote.
        tokenizer: Gives the names of BOS, EOS and padding where the folder does not.
        variables: More variables for the template, such as enable_thinking.

    Raises:
        ConfigError: There is no template, or it is not valid Jinja.
    """
    text, name, config = _find(source)
    if text is None:
        raise ConfigError(
            f"{source}: no chat template there; give a .jinja file, a tokenizer folder that has one, or one of "
            f"{', '.join(template_names())}"
        )
    template = Template(source=text, name=name, variables={**_token_names(tokenizer, config), **variables})
    _ = template._plain
    return template


def own_template(tokenizer: Tokenizer, **variables: Any) -> Template:
    """The chat template that came with a tokenizer.

    Raises:
        ConfigError: None did, or it is not valid Jinja.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer {tokenizer.name} has no chat template of its own; give one: a .jinja file (--template), a "
            f"tokenizer folder that has one, or one of {', '.join(template_names())}"
        )
    named = {**_token_names(tokenizer, {}), **variables}
    # As a template from that folder would be called.
    name = tokenizer.name.rpartition("/")[2]
    template = Template(source=tokenizer.chat_template, name=name, variables=named)
    _ = template._plain
    return template


def template_names() -> tuple[str, ...]:
    """Families of which there is a template, for text conversations without tools."""
    return tuple(sorted(path.stem for path in _OWN.glob("*.jinja")))


def _find(source: str | Path) -> tuple[str | None, str, Mapping[str, Any]]:
    """(text of the template or None, its name, tokenizer_config.json)."""
    if isinstance(source, str) and ("{%" in source or "{{" in source):
        return source, "given as text", {}
    path = Path(source)
    if source in template_names() and not path.exists():
        return (_OWN / f"{source}.jinja").read_text(encoding="utf-8"), str(source), {}
    if path.is_file() and path.suffix != ".json":
        return path.read_text(encoding="utf-8"), path.name, {}
    folder = path.parent if path.is_file() else path
    config_path = path if path.is_file() else folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
    own = folder / "chat_template.jinja"
    text = own.read_text(encoding="utf-8") if own.is_file() else template_in(config)
    return text, path.name, config


def _token_names(tokenizer: Tokenizer | None, config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like, from the folder or from the tokenizer."""
    named = {}
    if tokenizer is not None:
        texts = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
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


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reasoning under both names that templates read, as transformers does."""
    if _REASONING_NAMES.isdisjoint(message):
        return message
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _plain_name(found: re.Match[str]) -> str:
    return found[1].lower() or "str"


def _rebuild(source: str, name: str, variables: dict[str, Any], now: datetime | None) -> Template:
    return Template(source=source, name=name, variables=variables, now=now)
