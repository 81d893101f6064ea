"""Hooks in compiled chat templates, which record the turn and the message of everything that a
template writes.

`Rewrite` changes the syntax tree of a template before it is compiled:

- All output passes through a filter that records the current turn.
- A round of a loop over messages begins a turn; the end of the loop ends it. A message that the
  template builds from others (merged, filtered, renamed) counts as one of those that its text comes
  from.
- A round of a loop over the parts of a content names the image for which literal text is written.
- Values stored in variables, and literal strings on which methods are called, become `Traced`.

The output does not change.
"""

import operator
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any, TypeVar, cast, final

import jinja2
from jinja2 import nodes, runtime
from jinja2.visitor import NodeTransformer

from penstock.chat.render.traced_text import (
    Traced,
    TracedDict,
    TracedList,
    join,
    kept,
    made,
    runs_of,
    written,
)
from penstock.media.records import is_media_part

NO_OWNER = -1
Node = TypeVar("Node", bound=nodes.Node)


@final
class Turns:
    """The turn that a template is writing."""

    __slots__ = ("_entered", "_inside", "_messages", "_owner", "_part", "_stack")

    def __init__(self, messages: Any) -> None:
        self._messages = messages
        self._owner, self._entered, self._inside = NO_OWNER, False, NO_OWNER
        self._part = ""
        self._stack: list[tuple[int, bool, int, str]] = []

    def _begin_loop(self) -> None:
        self._stack.append((self._owner, self._entered, self._inside, self._part))
        self._inside = self._owner

    def _end_loop(self) -> None:
        self._owner, self._entered, self._inside, self._part = self._stack.pop()

    def _enter(self, item: Any) -> None:
        """Begin a round of a loop; over messages, this begins a turn."""
        message = self._message_of(item)
        self._entered = message is not None
        if isinstance(item, TracedDict) and item._path.startswith("content."):
            self._part = f"{item._message} {item._path}" if is_media_part(item) else ""
        # A loop inside a turn over earlier messages looks something up; over later ones, it writes
        # them.
        if message is not None and message > self._inside:
            self._owner = message

    def _message_of(self, item: Any) -> int | None:
        """The message that an item is or was built from; None for anything else."""
        if isinstance(item, TracedDict):
            return None if item._path else item._message
        if type(item) is not dict or "role" not in item:
            return None
        held = sorted(set(_messages_in(item.values())))
        # A system message merged into a question is part of the question.
        alike = [message for message in held if self._messages[message].get("role") == item["role"]]
        return alike[0] if alike else held[-1] if held else None

    def _look_up(self, value: Any) -> None:
        """Handle a message looked up by the number of the round (`messages[i]`): the first one
        begins the turn.
        """
        if not self._entered:
            self._enter(value)


def _messages_in(values: Iterable[Any]) -> Iterator[int]:
    """Messages with text or objects in `values`, at any depth."""
    for value in values:
        if isinstance(value, str):
            yield from (run[1] for run in runs_of(value) if run[1] >= 0)
        elif isinstance(value, (TracedDict, TracedList)):
            yield from (value._message,) if value._message >= 0 else ()
        elif isinstance(value, (dict, list, tuple)):
            yield from _messages_in(value.values() if isinstance(value, dict) else value)


@final
class TracingContext(runtime.Context):
    """Variables and turns of one render."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._turns = Turns(self.parent.get("messages"))


@jinja2.pass_context
def _write(context: TracingContext, value: Any) -> str:
    return written(value, context._turns._owner, context._turns._part)


@jinja2.pass_context
def _add(context: TracingContext, parts: list[Any]) -> Any:
    """`a + b + …` of strings in one step: step by step, each sum would copy all runs so far."""
    for part in parts:
        if not isinstance(part, str):
            return reduce(operator.add, parts)
    return join("", parts)


@jinja2.pass_context
def _keep(context: TracingContext, value: Any) -> Any:
    """A value that is stored in a variable."""
    if not isinstance(value, str):
        return value
    return kept(value, context._turns._owner, context._turns._part)


@jinja2.pass_context
def _enter(context: TracingContext, item: Any) -> str:
    context._turns._enter(item)
    return ""


@jinja2.pass_context
def _look_up(context: TracingContext, value: Any) -> Any:
    context._turns._look_up(value)
    return _keep(context, value)


@jinja2.pass_context
def _begin_loop(context: TracingContext, value: Any) -> str:
    context._turns._begin_loop()
    return ""


@jinja2.pass_context
def _end_loop(context: TracingContext, value: Any) -> str:
    context._turns._end_loop()
    return ""


@jinja2.pass_context
def _generated(context: TracingContext, value: Any) -> str:
    return made(value, tuple([(*run[:5], True) for run in Traced(value)._runs]))


HOOKS = {
    "penstock_write": _write,
    "penstock_add": _add,
    "penstock_keep": _keep,
    "penstock_enter": _enter,
    "penstock_look_up": _look_up,
    "penstock_begin_loop": _begin_loop,
    "penstock_end_loop": _end_loop,
    "penstock_generated": _generated,
}


def _hook(name: str, value: nodes.Expr) -> nodes.Expr:
    return _at(nodes.Filter(value, f"penstock_{name}", [], [], None, None), value.lineno)


def _statement(name: str, value: nodes.Expr) -> nodes.Output:
    return _at(nodes.Output([_hook(name, value)]), value.lineno)


def _at(node: Node, line: int) -> Node:
    node.set_lineno(line)
    return node


@final
class Rewrite(NodeTransformer):
    """Inserts the hooks into the syntax tree of a template."""

    def __init__(self) -> None:
        self._rounds: list[set[str]] = []

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [_hook("write", _as_text(child)) for child in node.nodes]
        return node

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        target = node.target
        names = {
            name.name
            for name in [target, *target.find_all(nodes.Name)]
            if isinstance(name, nodes.Name)
        }
        self._rounds.append(names | {"loop"})
        self.generic_visit(node)
        self._rounds.pop()
        nothing: nodes.Expr = _at(nodes.Const(""), node.lineno)
        item = (
            _at(nodes.Name(target.name, "load"), node.lineno)
            if isinstance(target, nodes.Name)
            else nothing
        )
        node.body.insert(0, _statement("enter", item))
        return [_statement("begin_loop", nothing), node, _statement("end_loop", nothing)]

    def visit_Assign(self, node: nodes.Assign) -> nodes.Assign:
        self.generic_visit(node)
        names = {
            name.name
            for name in [node.node, *node.node.find_all(nodes.Name)]
            if isinstance(name, nodes.Name)
        }
        by_round = bool(self._rounds) and bool(names & self._rounds[-1])
        node.node = _hook("look_up" if by_round else "keep", cast(nodes.Expr, node.node))
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Expr:
        parts: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            parts.append(left.right)
            left = left.left
        parts = [cast(nodes.Expr, self.visit(part)) for part in [left, *reversed(parts)]]
        if any(isinstance(part, nodes.Const) and isinstance(part.value, str) for part in parts):
            return _hook("add", _at(nodes.List(parts), node.lineno))
        return reduce(lambda total, part: _at(nodes.Add(total, part), node.lineno), parts)

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Getattr:
        self.generic_visit(node)
        if isinstance(node.node, nodes.Const) and isinstance(node.node.value, str):
            node.node = _hook("keep", node.node)
        return node

    def visit_Mod(self, node: nodes.Mod) -> nodes.Mod:
        self.generic_visit(node)
        if isinstance(node.left, nodes.Const) and isinstance(node.left.value, str):
            node.left = _hook("keep", node.left)
        return node


def _as_text(node: nodes.Expr) -> nodes.Expr:
    """Template text as a constant, which a filter can take."""
    if isinstance(node, nodes.TemplateData):
        return _at(nodes.Const(node.data), node.lineno)
    return node
