"""The doors of all rooms: what `dir` shows, what `__all__` lists and what type checkers see are the
same names.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import penstock
from penstock.core.errors import MissingExtraError
from penstock.core.lazy_imports import lazy

PACKAGE = Path(penstock.__file__).parent
DOORS = sorted(
    ".".join(["penstock", *path.relative_to(PACKAGE).parts[:-1]])
    for path in PACKAGE.rglob("__init__.py")
)
TOOLS = {"lazy", "public_names", "MissingExtraError", "__version__"}
"""What doors import for themselves; everything else that they import from penstock is public."""


def _body(door: str) -> list[ast.stmt]:
    path = PACKAGE.joinpath(*door.split(".")[1:], "__init__.py")
    return ast.parse(path.read_text()).body


def _imported(statements: list[ast.stmt]) -> dict[str, str]:
    """Public name → the module of penstock that it is imported from."""
    return {
        alias.asname or alias.name: node.module
        for node in statements
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "penstock"
        for alias in node.names
        if alias.name not in TOOLS
    }


def _lazy(door: str) -> dict[str, str]:
    """The names that are imported on first use."""
    blocks = [node for node in _body(door) if isinstance(node, ast.With)]
    return {name: module for block in blocks for name, module in _imported(block.body).items()}


def _defined(statements: list[ast.stmt]) -> set[str]:
    functions = {
        node.name for node in statements if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    targets = [
        target for node in statements if isinstance(node, ast.Assign) for target in node.targets
    ]
    names = functions | {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("door", DOORS)
def test_dir_shows_the_public_names_and_nothing_else(door):
    if door.endswith(".jax"):
        pytest.importorskip("jax")
    room = import_module(door)
    assert len(room.__all__) == len(set(room.__all__))
    assert {name for name in dir(room) if not name.startswith("__")} == set(room.__all__)


@pytest.mark.parametrize("door", DOORS)
def test_public_names_are_the_eager_and_the_lazy_ones(door):
    eager = set(_imported(_body(door))) | _defined(_body(door))
    assert eager & set(_lazy(door)) == set()
    assert eager | set(_lazy(door)) == set(import_module(door).__all__)


def _get(room: ModuleType, name: str) -> object:
    """A public name of a room; None: it needs a trainer that is not installed here, which no extra
    brings.
    """
    try:
        return getattr(room, name)
    except MissingExtraError:
        if not room.__name__.startswith("penstock.integrations."):
            raise
        return None


def _public() -> Iterator[tuple[str, str, object]]:
    """(door, name, object) of all public names. Constants are left out: equal numbers are the same
    object.
    """
    for door in DOORS:
        if not door.endswith(".jax") or find_spec("jax") is not None:
            room = import_module(door)
            objects = ((name, _get(room, name)) for name in room.__all__)
            yield from (
                (door, name, one)
                for name, one in objects
                if isinstance(one, ModuleType) or callable(one)
            )


def test_a_public_object_has_one_address():
    addresses: dict[int, list[str]] = {}
    for door, name, one in _public():
        addresses.setdefault(id(one), []).append(f"{door}.{name}")
    assert [places for places in addresses.values() if len(places) > 1] == []


def test_a_name_of_the_top_means_nothing_else_in_a_room():
    """Except `ps.huggingface.loss`: the module names whose loss it is, as in
    `ps.huggingface.Trainer`.
    """
    other = {
        f"{door}.{name}"
        for door, name, _ in _public()
        if door != "penstock" and name in penstock.__all__
    }
    assert other == {"penstock.integrations.huggingface.loss"}


@pytest.mark.slow
def test_lazy_names_are_the_objects_that_type_checkers_see():
    """With all modules imported: Python puts each of them into its room, where it must not hide a
    public name.
    """
    wanted = {door: _lazy(door) for door in DOORS}
    code = (
        "import importlib, json, pkgutil, sys, penstock\nfor module in "
        "pkgutil.walk_packages(penstock.__path__, 'penstock.'):\n    if "
        "module.name.endswith('__main__'): continue\n    try: "
        "importlib.import_module(module.name)\n    except "
        "penstock.errors.MissingExtraError:\n        if '.integrations.' not in module.name: "
        "raise\nfor door, names in json.loads(sys.argv[1]).items():\n    for name, home in "
        "names.items():\n        if '.integrations.' in home and home not in sys.modules: "
        "continue\n        module = sys.modules.get(f'{home}.{name}') if home == door else "
        "getattr(sys.modules[home], name)\n        if getattr(sys.modules[door], name) is not "
        "module: print(door, name)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, json.dumps(wanted)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.stdout, found.returncode) == ("", 0), found.stderr[-2000:]


def test_a_misspelt_name_is_answered_with_the_right_one():
    code = "import penstock as ps; ps.Laoder"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (
        "AttributeError: module 'penstock' has no attribute 'Laoder'. Did you mean: 'Loader'?"
        in found.stderr
    )


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with lazy names, of which some modules lack a package."""
    package = tmp_path / "lazyroom"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from math import pi\n\nfrom penstock.core.lazy_imports import lazy\n\n"
        "with lazy(__name__):\n    from lazyroom import plain\n"
        "    from lazyroom.plain import found as other\n"
        "    from lazyroom.with_torch import tensor\n"
        "    from lazyroom.with_unknown import unknown\n\n__all__ = ['pi', 'other', 'plain']\n"
    )
    (package / "plain.py").write_text("found = 3\n")
    (package / "with_torch.py").write_text("import torch\n")
    (package / "with_unknown.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    yield "lazyroom"
    for name in [name for name in sys.modules if name.split(".")[0] == "lazyroom"]:
        del sys.modules[name]


def test_lazy_names_say_what_is_missing(room: str):
    opened = import_module(room)
    assert "lazyroom.plain" not in sys.modules
    assert (opened.other, opened.plain.__name__) == (3, "lazyroom.plain")
    assert {name for name in dir(opened) if not name.startswith("__")} == {"pi", "other", "plain"}
    with pytest.raises(MissingExtraError, match=r"pip install 'penstock\[train\]'"):
        _ = opened.tensor
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        _ = opened.unknown
    with pytest.raises(AttributeError, match="module 'lazyroom' has no attribute 'pie'"):
        _ = opened.pie


def test_only_the_statements_of_the_block_are_put_off():
    """What other modules import meanwhile, in this thread or another, is imported."""
    this = sys.modules[__name__]
    with lazy(__name__):
        other = import_module("fractions")
        from penstock.core.lazy_imports import lazy as inner
    assert (other.Fraction(1, 2) * 2, inner is lazy) == (1, False)
    for name in ("__getattr__", "__dir__"):
        del vars(this)[name]
