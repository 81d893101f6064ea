"""The Jinja environment of chat templates, as transformers sets it up, and one that tells where text comes from.

Same sandbox, whitespace rules, extensions, filters and globals as `apply_chat_template` of transformers (read in its
version 5.23), so the text is the same. Templates reach nothing but the data that they are given. Tracing costs about
twice `apply_chat_template`.
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn, final

import jinja2
from jinja2 import ext, nodes, sandbox, utils
from jinja2.exceptions import SecurityError

from penstock.chat.filters import TRACED_FILTERS, format_braces
from penstock.chat.traced import Traced, coarse, join, spelled
from penstock.chat.writing import HOOKS, Rewrite, TracingContext


class _Generation(ext.Extension):
    """`{% generation %}` … `{% endgeneration %}`: what the template's author takes for the model's words."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 asks for

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.FilterBlock(body, nodes.Filter(None, "penstock_generated", [], [], None, None)).set_lineno(line)


def _fail(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _dumps(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@final
class _Dict:
    """`dict(...)` of templates: calls, and nothing else of the class."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(utils.Namespace):
    """`namespace(...)` of templates, without names that begin with an underscore."""

    def __init__(*arguments: Any, **named: Any) -> None:
        self, rest = arguments[0], arguments[1:]
        attributes = dict(*rest, **named)
        for name in attributes:
            _check_name(name)
        utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        utils.Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not keep {name!r} in a namespace: it begins with _")


def _watch(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose plain text is at least known by message and field."""
    pass_first = getattr(function, "jinja_pass_arg", None) is not None

    def watched(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        if isinstance(result, str):
            return coarse(result, [*arguments[1 if pass_first else 0 :], *named.values()])
        return result

    for attribute in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(function, attribute):
            setattr(watched, attribute, getattr(function, attribute))
    watched.__name__ = name
    return watched


_OF_DICTS = frozenset(dir(dict))


class ChatEnvironment(sandbox.ImmutableSandboxedEnvironment):
    """Compiles chat templates; traced or plain."""

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
        self.filters["tojson"] = _dumps
        self.filters["penstock_generated"] = lambda text: text
        self.globals["raise_exception"] = _fail
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute`; for a key of a message, without the exception that the sandbox meets first."""
        if isinstance(obj, dict) and attribute not in _OF_DICTS and not attribute.startswith("_"):
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


@final
class TracingEnvironment(ChatEnvironment):
    """Compiles chat templates so that what they write is `Traced`."""

    context_class = TracingContext
    # Jinja calls it with the pieces of a render, of a macro or of a block.
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
    def _joined(cls, parts: Iterable[Any]) -> Traced:
        return join("", [spelled(part) for part in parts])

    def wrap_str_format(self, value: Any) -> Any:
        """`format` and `format_map` of a string: as Jinja's sandbox allows them, traced."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        template: str = value.__self__
        if value.__name__ == "format_map":
            return lambda named: format_braces(self, template, (), named)
        return lambda *arguments, **named: format_braces(self, template, arguments, named)


def compile_template(source: str, environment: ChatEnvironment) -> jinja2.Template:
    """Compile, and let compiled code join strings with `join` where it would with `str.join`.

    Raises:
        jinja2.TemplateSyntaxError: As jinja2 does.
    """
    template = environment.from_string(source)
    if isinstance(environment, TracingEnvironment):
        # What `~` compiles to is a global of the compiled module.
        template.root_render_func.__globals__["str_join"] = environment._joined
    return template
