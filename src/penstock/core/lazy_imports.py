"""Public names of a room: which ones `dir` shows, and which are imported on first use.

A room imports eagerly what every user of it needs. Names that need an extra, or much time to import, are lazy:

```python
if TYPE_CHECKING:                                       # for editors and type checkers
    from penstock.training.trainer import Trainer
else:
    __getattr__, __dir__ = lazy(__name__, {"Trainer": "trainer"})

__all__ = ["TrainSettings", "Trainer"]                  # eager and lazy names
```

`else` keeps `__getattr__` from type checkers, so that they still report a misspelt name. A room whose names are all
eager has `__dir__ = public_names(__name__)`.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from penstock.core.errors import MissingExtraError

EXTRAS = {"torch": "train", "safetensors": "train", "fastapi": "serve", "starlette": "serve", "uvicorn": "serve"}
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
        `__getattr__`, which raises MissingExtraError if a module needs a package that is not installed, and
        AttributeError for an unknown name; and `__dir__`, see `public_names`.
    """

    def find(name: str) -> Any:
        if name not in names and name not in modules:
            raise AttributeError(f"module {room!r} has no attribute {name!r}", name=name, obj=sys.modules[room])
        try:
            if name in modules:
                return import_module(f"{room}.{modules[name]}")
            return getattr(import_module(f"{room}.{names[name]}"), name)
        except ModuleNotFoundError as error:
            if (explained := missing_extra(error)) is None:
                raise
            raise explained from error

    return find, public_names(room)


def public_names(room: str) -> Callable[[], list[str]]:
    """A room's `__dir__`: what `__all__` lists, without what the room imports for itself; and names like `__doc__`."""

    def names() -> list[str]:
        door = vars(sys.modules[room])
        return [*(name for name in door if name.startswith("__")), *door["__all__"]]

    return names


def require(package: str) -> None:
    """Raise MissingExtraError, with the pip command, if a package that a plain install brings is missing here."""
    if find_spec(package) is None:
        raise MissingExtraError(package)


def missing_extra(error: ModuleNotFoundError) -> MissingExtraError | None:
    """The error that names the pip command; None where no extra brings what is missing."""
    return MissingExtraError(error.name, EXTRAS[error.name]) if error.name in EXTRAS else None
