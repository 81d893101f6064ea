"""Public names of a room: which ones `dir` shows, and which are imported on first use.

A room imports eagerly what every user of it needs. Names that need an extra, or much time to
import, are lazy:

```python
if TYPE_CHECKING:                                       # for editors and type checkers
    from penstock.learn.training.trainer import Trainer
else:
    __getattr__, __dir__ = lazy(__name__, {"Trainer": "trainer"})

__all__ = ["TrainSettings", "Trainer"]                  # eager and lazy names
```

`else` keeps `__getattr__` from type checkers, so that they still report a misspelt name. A room
whose names are all eager has `__dir__ = public_names(__name__)`.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any

from penstock.core.errors import MissingExtraError

EXTRAS = {
    **dict.fromkeys(("torch", "safetensors"), "train"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "prometheus_client"), "serve"),
}
"""Packages that whole modules need, and the extra that brings each."""

_NO_MODULES: Mapping[str, str] = MappingProxyType({})


def lazy(
    room: str, names: Mapping[str, str], modules: Mapping[str, str] = _NO_MODULES
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A room's `__getattr__` and `__dir__`, for names that are imported on first use.

    Args:
        room: Full name of the room's package, its `__name__`.
        names: Lazy name → the module, relative to the room, that defines it.
        modules: Lazy name → the module, relative to the room, that the name is itself.

    Returns:
        `__getattr__`, which raises MissingExtraError if a module needs a package that is not
        installed, and AttributeError for an unknown name; and `__dir__`, see `public_names`.
    """

    def find(name: str) -> Any:
        if name not in names and name not in modules:
            raise AttributeError(
                f"module {room!r} has no attribute {name!r}", name=name, obj=sys.modules[room]
            )
        try:
            if name in modules:
                return import_module(f"{room}.{modules[name]}")
            return getattr(import_module(f"{room}.{names[name]}"), name)
        except ModuleNotFoundError as error:
            if (explained := missing_extra(error)) is None:
                raise
            raise explained from error

    return find, public_names(room)


def short_addresses(package: str, modules: Mapping[str, str]) -> None:
    """Let imports find modules by their short public names: `penstock.objectives` for
    `penstock.plan.objectives`.

    Both names give one and the same module, also for what lies in it.

    Args:
        package: Name of the package.
        modules: Short name → the module, relative to the package.
    """
    longer = {
        f"{package}.{short}": f"{package}.{full}"
        for short, full in modules.items()
        if short != full
    }
    sys.meta_path.insert(0, _ShortAddresses(longer))


class _ShortAddresses(MetaPathFinder, Loader):
    """Finds a module under another name; asked first, since `__path__` of the module would give a
    second copy.
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
