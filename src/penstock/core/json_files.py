"""JSON that strangers wrote, read with errors by name, and JSON with their texts in it, which can
be read back.
"""

import hashlib
import json
from pathlib import Path

from penstock.core.errors import ConfigError, FormatError, PenstockError
from penstock.core.json_values import JsonMapping, JsonObject, JsonValue


def parse_json(
    content: str | bytes, where: str | Path, error: type[PenstockError] = FormatError
) -> JsonValue:
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
        raise error(
            f"{where}: is nested too deeply; expected settings that a person could read"
        ) from None
    except ValueError as problem:
        raise error(f"{where}: is not JSON: {problem}; copy it again") from None


_SORTED = json.JSONEncoder(sort_keys=True)


def seal_of(value: JsonMapping, size: int = 16) -> str:
    """A hash of an object, of `size` bytes in hexadecimal."""
    text = _SORTED.encode(value)
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def read_object(path: Path, error: type[PenstockError] = FormatError) -> JsonObject:
    """The object in a JSON file.

    Raises:
        PenstockError: The file cannot be read, is not JSON, is nested too deeply, or holds
            something else.
    """
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise error(f"{path}: {problem.strerror}; give the folder of a model") from None
    found = parse_json(content, path, error)
    if not isinstance(found, dict):
        raise error(f"{path}: found {type(found).__name__}, expected a mapping of settings")
    return found


def json_text(value: object, where: str | Path, *, indent: int | None = None) -> str:
    """A value as JSON text that is read back as the same value.

    Args:
        value: Mappings, lists, texts and numbers.
        where: Its file, for errors.
        indent: Columns of a level; None: one line.

    Raises:
        ConfigError: No JSON text gives the value back.
    """
    for ascii_only in (False, True):
        text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
        try:
            text.encode()
        except UnicodeEncodeError:
            continue  # half of a surrogate pair, which only an escape can hold
        if json.dumps(json.loads(text)) == json.dumps(value):
            return text
    raise ConfigError(f"{where}: a value is not what it was after it was written and read")
