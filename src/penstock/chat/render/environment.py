"""The Jinja environment of chat templates, as transformers sets it up, and one that tracks where
text comes from.

Sandbox, whitespace rules, extensions, filters and globals are those of `apply_chat_template` in
transformers (read in version 5.23), so the text is the same. Templates can access only the data
that they are given. Tracing costs about twice `apply_chat_template`.

Filters that build text from several values track each character. `tojson` writes what `json.dumps`
does: a character of a string keeps its offset unless it is escaped; brackets, numbers and field
names belong to the object or list that they spell. All other filters keep only message and field
(`coarse`), which is enough to know the author.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn, final

import jinja2
from jinja2 import compiler, ext, filters, nodes, runtime, sandbox, utils
from jinja2.exceptions import SecurityError

from penstock.chat.render.template_output import HOOKS, Rewrite, TracingContext
from penstock.chat.render.traced_text import (
    GIVEN,
    KEY,
    LITERAL,
    TRACED,
    Run,
    Traced,
    coarse,
    format_percent,
    join,
    made,
    path_of,
    runs_of,
    spelled,
)

_ESCAPED = re.compile(r'[\\"\x00-\x1f]')
_ESCAPED_OR_WIDE = re.compile(r'[\\"]|[^ -~]')
_PLACE = tuple[int, str] | None
"""Message and path that punctuation belongs to; None for literal text."""

_OF_DICTS = frozenset(dir(dict))
_SAFE = {
    str: frozenset(name for name in dir(str) if not name.startswith("_"))
    - {"format", "format_map"},
    dict: frozenset(("items", "keys", "values", "get")),
}
"""Methods that the sandbox allows and gives as they are."""


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """`json.dumps` with these arguments, traced."""
    # The parts of a tool's schema need no origin of their own.
    given = isinstance(value, TRACED) and value._message == GIVEN
    if given or not _holds_traced(value):
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        return Traced(coarse(text, [value]))
    if isinstance(indent, int):
        indent = " " * indent
    between, colon = separators or ((",", ": ") if indent is not None else (", ", ": "))
    writer = _Writer(ensure_ascii, indent, between, colon, sort_keys)
    writer.write(value, None, "\n")
    return made("".join(writer.texts), tuple(writer.runs))


def _holds_traced(value: Any) -> bool:
    """Whether any part of a value comes from a message or another part of the conversation."""
    if type(value) is dict:
        return any(map(_holds_traced, value)) or any(map(_holds_traced, value.values()))
    if type(value) in (list, tuple):
        return any(map(_holds_traced, value))
    return isinstance(value, TRACED) or (isinstance(value, str) and type(value) is not str)


class _Writer:
    """Writes JSON piece by piece."""

    def __init__(
        self, ascii_only: bool, indent: str | None, between: str, colon: str, sort_keys: bool
    ) -> None:
        self._escaped = _ESCAPED_OR_WIDE if ascii_only else _ESCAPED
        self._ascii_only, self._sort_keys = ascii_only, sort_keys
        self._indent, self._between, self._colon = indent, between, colon
        self.texts: list[str] = []
        self.runs: list[Run] = []

    def write(self, value: object, place: _PLACE, line: str) -> None:
        """Write a value; `line` is the line break with the current indentation."""
        if isinstance(value, str):
            self._write_string(value, place)
        elif isinstance(value, dict):
            items = list(value.items())
            self._write_list(
                "{}", sorted(items) if self._sort_keys else items, _place_of(value, place), line
            )
        elif isinstance(value, (list, tuple)):
            self._write_list("[]", list(value), _place_of(value, place), line)
        else:
            self._put(json.dumps(value, ensure_ascii=self._ascii_only), _place_of(value, place))

    def _put(self, text: str, place: _PLACE, offset: int = -1) -> None:
        """Append text that no field contains as it is."""
        message, field = place or (LITERAL, "")
        self.texts.append(text)
        if self.runs and self.runs[-1][1:4] == (message, field, offset):
            self.runs[-1] = (self.runs[-1][0] + len(text), message, field, offset, None, False)
        else:
            self.runs.append((len(text), message, field, offset, None, False))

    def _write_list(self, brackets: str, items: list[Any], place: _PLACE, line: str) -> None:
        if not items:
            self._put(brackets, place)
            return
        inner = line + (self._indent or "")
        opening, separator, closing = brackets[0], self._between, brackets[1]
        if self._indent is not None:
            opening, separator, closing = opening + inner, separator + inner, line + closing
        before = opening
        for number, item in enumerate(items):
            self._put(before, place)
            if brackets == "{}":
                key, item = item
                inside = _place_of(key, place)
                self._put(
                    _key(key, self._ascii_only) + self._colon,
                    inside,
                    -1 if inside == place else KEY,
                )
            else:
                inside = place and (place[0], path_of(place[1], number))
            self.write(item, inside, inner)
            before = separator
        self._put(closing, place)

    def _write_string(self, value: str, place: _PLACE) -> None:
        value = Traced(value)
        place = _place_of(value, place)
        self._put('"', place)
        at = 0
        for found in self._escaped.finditer(value):
            self._keep(value, at, found.start())
            at = found.end()
            character = value.cut(found.start(), at)
            escape = json.dumps(str.__str__(character), ensure_ascii=self._ascii_only)[1:-1]
            self._keep(Traced(coarse(escape, [character])), 0, len(escape))
        self._keep(value, at, len(value))
        self._put('"', place)

    def _keep(self, value: Traced, begin: int, end: int) -> None:
        if begin < end:
            part = value.cut(begin, end)
            self.texts.append(part)
            self.runs += part._runs


def _place_of(value: Any, place: _PLACE) -> _PLACE:
    """Place of a value; `place` if it has none of its own."""
    if isinstance(value, str):
        return runs_of(value)[0][1:3] if value and runs_of(value)[0][1] != LITERAL else place
    return (value._message, value._path) if isinstance(value, TRACED) else place


def _key(key: object, ascii_only: bool) -> str:
    """A key as `json.dumps` writes it; it turns None, booleans and numbers into strings."""
    if isinstance(key, str):
        return json.dumps(key, ensure_ascii=ascii_only)
    return json.dumps({key: 0}, ensure_ascii=ascii_only)[1:].rpartition(": ")[0]


@jinja2.pass_eval_context
def _join(eval_context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(filters.make_attrgetter(eval_context.environment, attribute), value)
    return join(spelled(d), [spelled(part) for part in value])


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    space = width if isinstance(width, str) else " " * width
    lines = (Traced(s) + "\n").splitlines()
    indented = [
        space + line if number and (line or blank) else line for number, line in enumerate(lines)
    ]
    return space + join("\n", indented) if first else join("\n", indented)


def _format(value: str, *arguments: object, **named: object) -> str:
    if arguments and named:
        raise jinja2.exceptions.FilterArgumentError(
            "can't handle positional and keyword arguments at the same time"
        )
    return format_percent(value, named or arguments)


def _title(s: object) -> str:
    traced = Traced(spelled(s))
    title = filters.do_title(str.__str__(traced))
    return Traced(title, traced._runs) if len(title) == len(traced) else coarse(title, [traced])


class _Recorder(sandbox.SandboxedFormatter):
    """Records the pieces of the formatted text; they do not add up to it if a field has its own
    format.
    """

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.pieces: list[str] = []

    def parse(self, format_string: Any) -> Iterator[Any]:
        for parts in super().parse(format_string):
            self.pieces.append(parts[0])
            yield parts

    def format_field(self, value: object, format_spec: str) -> Any:
        self.pieces.append(spelled(value))
        return super().format_field(value, format_spec)


def format_braces(environment: Any, template: str, arguments: Any, named: Any) -> str:
    """`template.format(*arguments, **named)` in Jinja's sandbox; exact if no field has its own
    format.
    """
    recorder = _Recorder(environment)
    text = recorder.vformat(template, arguments, named)
    exact = join("", recorder.pieces)
    known = all(run[1] == LITERAL for run in runs_of(template))
    return (
        exact if known and str.__eq__(exact, text) else coarse(text, [template, *arguments, named])
    )


TRACED_FILTERS = {
    "tojson": to_json,
    "join": _join,
    "indent": _indent,
    "format": _format,
    "string": spelled,
    "title": _title,
    "safe": spelled,
}
"""Name → filter; they replace those of the environment."""


class _Generation(ext.Extension):
    """`{% generation %}` … `{% endgeneration %}`: what the model generates, according to the
    template's author.
    """

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 expects

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.FilterBlock(
            body, nodes.Filter(None, "penstock_generated", [], [], None, None)
        ).set_lineno(line)


def _fail(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _dumps(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


_HELD = "_Namespace__attrs"
"""Where Jinja's namespaces keep what they hold. Asked for directly: their own look-up of any name,
even of `__class__`, is three calls of Python.
"""


@final
class _Dict:
    """`dict(...)` in templates: calls, and `fromkeys`."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, keys: Iterable[object], value: object = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(utils.Namespace):
    """`namespace(...)` in templates, without names that begin with an underscore."""

    def __init__(*arguments: object, **named: object) -> None:
        self, rest = arguments[0], arguments[1:]
        attributes = dict(*rest, **named)
        for name in attributes:
            _check_name(name)
        utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        object.__getattribute__(self, _HELD)[name] = value


_OF_JINJA = frozenset((_Namespace, runtime.LoopContext))


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a chat template may not keep {name!r} in a namespace: it begins with _"
        )


def _watch(name: str, function: Callable[..., object]) -> Callable[..., Any]:
    """The filter, with message and field for any plain text that it returns."""
    pass_first = getattr(function, "jinja_pass_arg", None) is not None

    def watched(*arguments: object, **named: object) -> Any:
        result = function(*arguments, **named)
        if isinstance(result, str):
            return coarse(result, [*arguments[1 if pass_first else 0 :], *named.values()])
        return result

    for attribute in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(function, attribute):
            setattr(watched, attribute, getattr(function, attribute))
    watched.__name__ = name
    return watched


class _QuickReads(compiler.CodeGenerator):
    """Compiles `message.role` and `message['role']` so that a plain dict that has the field is read
    in place; for anything else the environment decides.

    The renders for the prompts of a trace read fields hundreds of times a reply, and each was a
    call or two of Python.
    """

    def visit_Getattr(self, node: nodes.Getattr, frame: compiler.Frame) -> None:  # noqa: N802
        plain = node.attr not in _OF_DICTS and not node.attr.startswith("_")
        self._read(node, node.attr if plain else None, frame, super().visit_Getattr)

    def visit_Getitem(self, node: nodes.Getitem, frame: compiler.Frame) -> None:  # noqa: N802
        name = node.arg.value if isinstance(node.arg, nodes.Const) else None
        self._read(node, name if type(name) is str else None, frame, super().visit_Getitem)

    def _read(
        self, node: Any, name: str | None, frame: compiler.Frame, otherwise: Callable[..., None]
    ) -> None:
        if name is None or not isinstance(node.node, nodes.Name):
            otherwise(node, frame)
            return
        held = frame.symbols.ref(node.node.name)
        self.write(f"({held}[{name!r}] if type({held}) is dict and {name!r} in {held} else ")
        otherwise(node, frame)
        self.write(")")


class ChatEnvironment(sandbox.ImmutableSandboxedEnvironment):
    """Compiles chat templates; traced or plain."""

    code_generator_class: type[compiler.CodeGenerator] = _QuickReads

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
        )
        self.filters["tojson"] = _dumps
        self.filters["penstock_generated"] = lambda text: text
        self.globals["raise_exception"] = _fail
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def getattr(self, obj: object, attribute: str) -> Any:
        """`obj.attribute`; quicker for texts and messages, where the sandbox would ask six
        questions.
        """
        if type(obj) in _OF_JINJA and not attribute.startswith("_"):
            if type(obj) is _Namespace:
                held = object.__getattribute__(obj, _HELD)
                if attribute in held:
                    return held[attribute]
            else:
                # Once: `loop.last` looks ahead each time that it is asked for.
                found = getattr(obj, attribute, _HELD)
                if found is not _HELD:
                    return found
            return self.undefined(obj=obj, name=attribute)
        if isinstance(obj, dict):
            if attribute not in _OF_DICTS and not attribute.startswith("_"):
                return (
                    obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
                )
            if attribute in _SAFE[dict]:
                return getattr(obj, attribute)
        elif isinstance(obj, str) and attribute in _SAFE[str]:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: object, argument: object) -> Any:
        """`obj[argument]`; quicker for characters of a content that a template takes for a list of
        parts (`part['type']`).
        """
        if isinstance(obj, str) and type(argument) is str and not hasattr(obj, argument):
            return self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)


@final
class TracingEnvironment(ChatEnvironment):
    """Compiles chat templates so that their output is `Traced`."""

    code_generator_class = compiler.CodeGenerator
    context_class = TracingContext
    # Jinja calls it with the pieces of a render, a macro or a block.
    concat = staticmethod(lambda pieces: join("", list(pieces)))

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(now)
        for name, function in list(self.filters.items()):
            self.filters[name] = _watch(name, function)
        self.filters |= TRACED_FILTERS | HOOKS

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = Rewrite().visit(super()._parse(source, name, filename))
        return tree

    @classmethod
    def _joined(cls, parts: Iterable[object]) -> Traced:
        return join("", [spelled(part) for part in parts])

    def wrap_str_format(self, value: Any) -> Any:
        """`format` and `format_map` of a string, as Jinja's sandbox allows them, but traced."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        template: str = value.__self__
        if value.__name__ == "format_map":
            return lambda named: format_braces(self, template, (), named)
        return lambda *arguments, **named: format_braces(self, template, arguments, named)


def compile_template(source: str, environment: ChatEnvironment) -> jinja2.Template:
    """Compile a template; in a tracing environment its code joins strings with `join` instead of
    `str.join`.

    Raises:
        jinja2.TemplateSyntaxError: The template is not valid Jinja.
    """
    template = environment.from_string(source)
    if isinstance(environment, TracingEnvironment):
        # `~` compiles to a call of this global of the compiled module.
        template.root_render_func.__globals__["str_join"] = environment._joined
    return template
