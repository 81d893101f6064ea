"""Code of the user's own, by name: `module:function` or `path/to/file.py:function`, as run files
give it.

A module is imported as Python would import it, with the working directory among the places that are
searched. A file is read once, and its path is relative to the working directory.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.suggestions import did_you_mean


def is_own_code(text: object) -> bool:
    """Whether a text names code: `module:function` or `file.py:function`."""
    place, colon, name = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    is_place = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    return bool(colon) and is_place and all(part.isidentifier() for part in name.split("."))


def load_own_code(given: object, where: str) -> Any:
    """Resolve a name; non-strings are returned unchanged.

    Args:
        given: `module:function`, `path/to/file.py:function`, or the object itself.
        where: The setting, for errors.

    Raises:
        ConfigError: There is no such module, file or name, or the file cannot be imported.
    """
    if isinstance(given, str):
        place, _, name = given.rpartition(":")
        if not is_own_code(given):
            raise ConfigError(
                f"{where}: found {given!r}, expected module:function or "
                "path/to/file.py:function, such as my_losses:focal"
            )
        found = _module(place, where)
        for part in name.split("."):
            if not hasattr(found, part):
                public = [one for one in dir(found) if not one.startswith("_")]
                raise ConfigError(
                    f"{where}: {place} has no {part!r}; "
                    f"{did_you_mean(part, public, 'check the name')}"
                )
            found = getattr(found, part)
        return found
    return given


def check_signature(function: Any, where: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """The function, if it can be called with these positional arguments.

    Args:
        function: What was given.
        where: The setting, for errors.
        parameters: Names of the arguments, in order.

    Raises:
        ConfigError: It cannot be called, or takes other arguments.
    """
    expected = f"a function ({', '.join(parameters)})"
    called: Callable[..., Any] = function
    if not callable(function):
        raise ConfigError(f"{where}: found {function!r}, expected {expected}")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{where}: found an async function, expected {expected}; call it in one that is not, "
            "with asyncio.run"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some built-in functions do not say what they take.
        return called
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise ConfigError(
            f"{where}: found a function {signature}, expected {expected}: {error}"
        ) from None
    return called


def code_digest(given: object) -> str | None:
    """Digest of the file that code of the user's own stands in; None: it is not the user's own, or
    has no file.

    Args:
        given: `module:function`, `path/to/file.py:function`, or a function, class or object.
    """
    if given is None or (isinstance(given, str) and not is_own_code(given)):
        return None
    try:
        found = load_own_code(given, "code")
    except ConfigError as error:
        return str(error)
    while isinstance(found, partial):
        found = found.func
    if not inspect.isroutine(found) and not inspect.isclass(found):
        found = type(found)
    if str(getattr(found, "__module__", "")).partition(".")[0] in ("builtins", "penstock"):
        return None
    try:
        return blake2b(
            Path(inspect.getsourcefile(found) or "").read_bytes(), digest_size=6
        ).hexdigest()
    except (OSError, TypeError):
        # Written in a notebook, or compiled.
        return None


def name_of(given: object) -> str | None:
    """`module:function` of an object that this name gives back; None for others, such as those of a
    script.
    """
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    if not is_own_code(f"{module}:{name}"):
        return None
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return f"{module}:{name}" if found is given else None


def _module(place: str, where: str) -> ModuleType:
    if place.endswith(".py"):
        return _file_module(Path(place), where)
    added = "" not in sys.path
    if added:
        sys.path.insert(0, "")
    try:
        return import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{where}: there is no module {place!r}; install it, start in its folder, or give "
            "path/to/file.py:function"
        ) from None
    finally:
        if added:
            sys.path.remove("")


def _file_module(path: Path, where: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            f"{where}: there is no file {path}; the path is relative to the working directory"
        )
    whole = path.resolve()
    name = f"penstock_own_{path.stem}_{blake2b(str(whole).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, whole)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: {path} cannot be imported as Python; give a .py file")
    module = module_from_spec(spec)
    # Dataclasses look their module up while the file is read.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
