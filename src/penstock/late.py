"""Names of a room that are imported when they are asked for, as they need an extra that the room's others do not."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from penstock.errors import MissingExtraError

EXTRAS = {"torch": "train", "safetensors": "train", "fastapi": "serve", "starlette": "serve", "uvicorn": "serve"}
"""Packages that whole modules need, and the extra that brings each."""


def import_late(room: str, homes: Mapping[str, str], name: str) -> Any:
    """What `name` means in a room, for its `__getattr__`.

    Args:
        room: Its full name.
        homes: The module of the room in which each late name is.
        name: That is asked for.

    Raises:
        AttributeError: The room has no such name.
        MissingExtraError: The module needs a package that is not installed.
    """
    if name not in homes:
        raise AttributeError(f"module {room!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{room}.{homes[name]}"), name)
    except ModuleNotFoundError as error:
        if (told := missing_extra(error)) is None:
            raise
        raise told from error


def missing_extra(error: ModuleNotFoundError) -> MissingExtraError | None:
    """The error that names the pip command; None where no extra brings what is missing."""
    return MissingExtraError(error.name, EXTRAS[error.name]) if error.name in EXTRAS else None
