"""Reads JSON that strangers wrote: what is damaged, or nested more deeply than Python reads, is an error by name."""

import json
from pathlib import Path
from typing import Any

from penstock.core.errors import FormatError, PenstockError


def parse_json(content: str | bytes, where: str | Path, error: type[PenstockError] = FormatError) -> Any:
    """The value of a JSON text.

    Args:
        content: The text.
        where: Its file, for errors.
        error: Class of the error.

    Raises:
        PenstockError: It is not JSON, or nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise error(f"{where}: is nested too deeply; expected settings that a person could read") from None
    except ValueError as problem:
        raise error(f"{where}: is not JSON: {problem}; copy it again") from None


def read_object(path: Path, error: type[PenstockError] = FormatError) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        PenstockError: The file cannot be read, is not JSON, is nested too deeply, or holds something else.
    """
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise error(f"{path}: {problem.strerror}; give the folder of a model") from None
    found = parse_json(content, path, error)
    if not isinstance(found, dict):
        raise error(f"{path}: found {type(found).__name__}, expected a mapping of settings")
    return found
