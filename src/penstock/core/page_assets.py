"""Files that pages are made of, and their names in a content security policy."""

import base64
import hashlib
from importlib.resources import files


def asset(package: str, name: str) -> str:
    """The text of a file in a package's folder `assets`."""
    return files(package).joinpath("assets", name).read_text(encoding="utf-8")


def inline_hash(text: str) -> str:
    """The name of an inline text in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
