"""Small files written whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import OutputError


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turn a failure to write into an error that says where and what to do."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            f"{path}: cannot write: {error.strerror or error}; make room or choose another folder, then run it again: "
            "finished parts are kept"
        ) from error


def write_text(path: Path, content: str) -> None:
    """Write a file under another name, force it to the disk, rename it."""
    partial = path.with_name(path.name + ".partial")
    with output_errors(path):
        with open(partial, "wb") as stream:
            stream.write(content.encode("utf-8", "backslashreplace"))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)


def save_json(path: Path, value: Any) -> None:
    """`write_text` of JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
