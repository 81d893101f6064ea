"""Public names of a room: which ones `dir` shows, and which are imported on first use.

A room imports eagerly what every user of it needs. Names that need an extra, or much time to
import, are lazy:

```python
with lazy(__name__):
    from penstock.learn.training.trainer import Trainer

__all__ = ["TrainSettings", "Trainer"]                  # eager and lazy names
```

Type checkers see plain imports, and no `__getattr__`, so they still report a misspelt name. A room
whose names are all eager has `__dir__ = public_names(__name__)`.
"""

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import RLock
from types import ModuleType
from typing import Any, NamedTuple, final

from penstock.core.errors import MissingExtraError

EXTRAS = {
    **dict.fromkeys(("torch", "safetensors"), "train"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "prometheus_client"), "serve"),
}
"""Packages that whole modules need, and the extra that brings each."""

_origins: dict[str, dict[str, tuple[str, str]]] = {}
"""Room → lazy name → (module, name in it, or that of a module below it)."""
_one_block = RLock()


@contextmanager
def lazy(room: str, *, addresses: bool = False) -> Iterator[None]:
    """The imports in the block happen when a name is first used; type checkers see them as they
    stand.

    Gives the room `__getattr__`, which raises MissingExtraError if a module needs a package that is
    not installed, and AttributeError for an unknown name; and `__dir__`, see `public_names`.

    Args:
        room: Full name of the room, its `__name__`.
        addresses: The names are modules, and `room.name` is also an address of each for imports.
    """
    door = vars(sys.modules[room])
    origins = _origins.setdefault(room, {})

    def find(name: str) -> Any:
        if name not in origins:
            raise AttributeError(
                f"module {room!r} has no attribute {name!r}", name=name, obj=sys.modules[room]
            )
        module, inner = origins[name]
        try:
            names = vars(import_module(module))
            return names[inner] if inner in names else import_module(f"{module}.{inner}")
        except ModuleNotFoundError as error:
            if (explained := missing_extra(error)) is None:
                raise
            raise explained from error

    with _one_block, _imported_later(door):
        yield
    found = {name: one for name, one in door.items() if isinstance(one, _Later)}
    for name, later in found.items():
        del door[name]
        origins[name] = later.module, later.name
    door["__getattr__"], door["__dir__"] = find, public_names(room)
    if addresses:
        longer = {f"{room}.{name}": f"{one.module}.{one.name}" for name, one in found.items()}
        sys.meta_path.insert(
            0, _ShortAddresses({short: full for short, full in longer.items() if short != full})
        )


class _Later(NamedTuple):
    """What a name stands for, until the end of the block."""

    module: str
    name: str


@final
class _LaterModule(ModuleType):
    """What an import in a block gives."""

    def __getattr__(self, name: str) -> _Later:
        return _Later(self.__name__, name)


@contextmanager
def _imported_later(door: dict[str, Any]) -> Iterator[None]:
    """Imports in the code of one module import nothing meanwhile; those of others are as always."""
    usual = builtins.__import__

    def later(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if globals is door:
            return _LaterModule(name)
        return usual(name, globals, locals, fromlist, level)

    builtins.__import__ = later
    try:
        yield
    finally:
        builtins.__import__ = usual


class _ShortAddresses(MetaPathFinder, Loader):
    """Lets imports find modules by their short public names: `penstock.objectives` for
    `penstock.plan.objectives`.

    Both names give one and the same module, also for what lies in it. Asked first, since `__path__`
    of the module would give a second copy.
    """

    def __init__(self, longer: Mapping[str, str]) -> None:
        self._longer = longer

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        short = ".".join(fullname.split(".")[:2])
        return ModuleSpec(fullname, self) if short in self._longer else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        short = ".".join(spec.name.split(".")[:2])
        module = import_module(self._longer[short] + spec.name.removeprefix(short))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It ran under its own name; what the import system wrote over its `__spec__` is put
        back.
        """
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def public_names(room: str) -> Callable[[], list[str]]:
    """A room's `__dir__`: what `__all__` lists, without what the room imports for itself; and names
    like `__doc__`.
    """

    def names() -> list[str]:
        door = vars(sys.modules[room])
        return [*(name for name in door if name.startswith("__")), *door["__all__"]]

    return names


def require(package: str) -> None:
    """Raise MissingExtraError, with the pip command, if a package that a plain install brings is
    missing here.
    """
    if find_spec(package) is None:
        raise MissingExtraError(package)


def missing_extra(error: ModuleNotFoundError) -> MissingExtraError | None:
    """The error that names the pip command; None where no extra brings what is missing."""
    return MissingExtraError(error.name, EXTRAS[error.name]) if error.name in EXTRAS else None
