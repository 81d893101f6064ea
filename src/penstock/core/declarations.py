"""What a settings class or a function says of its settings, read from the source without importing
it.

A setting is declared once: by a field of a dataclass with the text below it, or by a parameter of a
function with its entry under `Args:`. The command line, the keywords that editors complete and the
schema of run files are made from these declarations.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from inspect import cleandoc
from itertools import chain
from pathlib import Path
from typing import final

from penstock.core.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
_PLAIN = ("Path", "bool", "int", "float", "str")
"""Types of one word; of a union, the last of these."""
_LISTS = ("tuple", "list", "Sequence")


@final
@dataclass(frozen=True, slots=True)
class Declaration:
    """A setting as its source declares it."""

    name: str
    hint: ast.expr
    """Its type."""
    default: ast.expr | None
    """None: it must be given."""
    note: str
    """What it means, on one line."""
    module: str
    """Full name of the module where it stands; names in its type are those of that module."""

    @property
    def value(self) -> object:
        """The default, if it is a constant, also by a name or as a product of numbers; else
        None.
        """
        named = None
        if isinstance(self.default, ast.Name):
            named = _resolve(self.module, self.default.id)
        node = self.default if named is None else named[1]
        return None if node is None else _constant(node)

    def shape(self) -> "Shape":
        """What a value may be, as far as a command line can say."""
        return _shape(self.module, self.hint)


@final
@dataclass(frozen=True, slots=True)
class Shape:
    """What a value may be."""

    plain: str = ""
    """`int`, `float`, `bool`, `str`, `Path`, or "" for what one word cannot say."""
    choices: tuple[str, ...] = ()
    """All values, where these are known texts."""
    repeated: bool = False
    """Several such values."""


@cache
def declared(address: str) -> Mapping[str, Declaration]:
    """The settings of a class, those of its bases first, or the parameters of a function, in order.

    Args:
        address: Module and name, such as `penstock.learn.generation.settings.Sampling`; of a
            method, module, class and name.

    Raises:
        ConfigError: There is no such class or function.
    """
    module, _, name = address.rpartition(".")
    found = _resolve(module, name) or _method(module, name)
    module, node = found or (module, None)
    if isinstance(node, ast.FunctionDef):
        return {one.name: one for one in _parameters(module, node)}
    if not isinstance(node, ast.ClassDef):
        raise ConfigError(f"{address}: no class or function of this name")
    known: dict[str, Declaration] = {}
    for base in reversed(node.bases):
        origin = _resolve(module, ast.unparse(base))
        if origin is not None and isinstance(origin[1], ast.ClassDef):
            known |= dict(declared(f"{origin[0]}.{origin[1].name}"))
    return known | {one.name: one for one in _fields(module, node)}


def _method(owner: str, name: str) -> tuple[str, ast.AST] | None:
    module, _, name_of_class = owner.rpartition(".")
    found = _resolve(module, name_of_class)
    if found is None or not isinstance(found[1], ast.ClassDef):
        return None
    methods = (one for one in found[1].body if isinstance(one, ast.FunctionDef))
    return next(((found[0], one) for one in methods if one.name == name), None)


def _constant(node: ast.AST) -> object:
    numbers = (ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop)
    if isinstance(node, ast.BinOp) and all(
        isinstance(one, (*numbers, ast.Constant)) for one in ast.walk(node)
    ):
        return eval(ast.unparse(node), {})  # numbers of our own source, such as 20 << 20
    try:
        return ast.literal_eval(ast.unparse(node)) if isinstance(node, ast.expr) else None
    except ValueError:
        return None


def _fields(module: str, node: ast.ClassDef) -> Iterator[Declaration]:
    for one, below in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        default = one.value
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "field":
            given = {word.arg: word.value for word in default.keywords}
            if "init" in given:
                continue
            default = given.get("default", given.get("default_factory"))
        yield Declaration(one.target.id, one.annotation, default, _text(below), module)


def _parameters(module: str, node: ast.FunctionDef) -> Iterator[Declaration]:
    notes = _notes(ast.get_docstring(node) or "")
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = zip(
        [*positional, *arguments.kwonlyargs],
        [*defaults, *arguments.defaults, *arguments.kw_defaults],
        strict=True,
    )
    for one, default in pairs:
        if one.annotation is not None:
            yield Declaration(one.arg, one.annotation, default, notes.get(one.arg, ""), module)


def _notes(docstring: str) -> dict[str, str]:
    """Parameter → its text under `Args:`."""
    notes: dict[str, str] = {}
    name = ""
    _, _, rest = docstring.partition("\nArgs:\n")
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        if line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            notes[name] = text
        elif name:
            notes[name] = f"{notes[name]} {line.strip()}".strip()
    return notes


def _text(node: ast.stmt | None) -> str:
    """The text that stands below a field, on one line."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(cleandoc(str(node.value.value)).split())
    return ""


def _shape(module: str, hint: ast.expr) -> Shape:
    if isinstance(hint, ast.BinOp):
        shapes = [_shape(module, one) for one in members_of(hint)]
        return max(shapes, key=_says)
    if isinstance(hint, ast.Subscript):
        outer = ast.unparse(hint.value)
        inner = hint.slice.elts if isinstance(hint.slice, ast.Tuple) else [hint.slice]
        if outer == "Literal":
            return Shape("str", tuple(str(ast.literal_eval(one)) for one in inner))
        if outer in _LISTS and (len(inner) == 1 or ast.unparse(inner[-1]) == "..."):
            return replace(_shape(module, inner[0]), repeated=True)
        return Shape()
    name = ast.unparse(hint)
    if name in _PLAIN:
        return Shape(name)
    found = _resolve(module, name)
    if found is not None and isinstance(found[1], ast.expr):
        return _shape(found[0], found[1])
    return Shape()


def _says(shape: Shape) -> tuple[bool, bool, int]:
    """How much a member of a union says of a value; the one that says most stands for it."""
    return bool(shape.choices), shape.repeated, ("", *_PLAIN).index(shape.plain)


def members_of(hint: ast.expr) -> Iterator[ast.expr]:
    """The types of a union, in order; of another type itself."""
    if isinstance(hint, ast.BinOp):
        yield from members_of(hint.left)
        yield from members_of(hint.right)
    else:
        yield hint


def module_of(module: str, name: str) -> str | None:
    """The module from which a module has a name, itself where it defines it; None: a builtin."""
    found = _names(module).get(name)
    if found is None:
        return None
    return found[0] if isinstance(found, tuple) else module


def _resolve(module: str, name: str) -> tuple[str, ast.AST] | None:
    """Where a name of a module is defined, and its definition; None if not in penstock."""
    found = _names(module).get(name)
    if isinstance(found, tuple):
        return _resolve(*found)
    return None if found is None else (module, found)


@cache
def _names(module: str) -> Mapping[str, ast.AST | tuple[str, str]]:
    """What a module's top level defines, and what it imports: (module, name). Of modules of others,
    nothing.
    """
    package, *parts = module.split(".")
    if package != PACKAGE.name:
        return {}
    place = PACKAGE.joinpath(*parts)
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    try:
        top = ast.parse(path.read_text(encoding="utf-8")).body
    except FileNotFoundError:
        return {}
    names: dict[str, ast.AST | tuple[str, str]] = {}
    blocks = [node.body for node in top if isinstance(node, ast.With)]  # `lazy` imports
    for node in (*top, *chain.from_iterable(blocks)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = node.value
        elif isinstance(node, ast.ImportFrom):
            names |= {one.asname or one.name: (str(node.module), one.name) for one in node.names}
    return names
