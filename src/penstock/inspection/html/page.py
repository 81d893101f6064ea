"""One page that needs nothing else: no network, no fonts, no scripts but its own.

All that comes from data goes through JSON into an inert element, and from there into text nodes only. The page's
policy lets no script run but the one whose hash it names, and nothing be fetched at all.
"""

import base64
import hashlib
import html
import json
import os
import re
from importlib.resources import files
from pathlib import Path

from penstock.errors import OutputError
from penstock.inspection.html.payload import payload
from penstock.inspection.html.views import PageData

SCRIPTS = ("data", "elements", "tokens", "difference", "documents", "rewritten", "rows", "figures", "main")
"""Parts of the page's script, in the order in which they need each other."""


def write_html(path: str | os.PathLike[str], data: PageData) -> None:
    """Write the page.

    Args:
        path: The file, replaced where it exists.
        data: What to show.

    Raises:
        OutputError: The file cannot be written.
    """
    text = page_html(data)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"{path}: the page cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from error


def page_html(data: PageData) -> str:
    """The page as text."""
    script = '"use strict";\n' + "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    style = _asset("style.css")
    content = {
        "policy": f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'",
        "title": html.escape(data.title),
        "style": style,
        "script": script,
        # In a script element only "<" can end or open anything.
        "data": json.dumps(payload(data), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    # One pass: a placeholder inside data stays what it is.
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: content[found[1]], _asset("page.html"))
    return page.encode("utf-8", "backslashreplace").decode()


def _asset(name: str) -> str:
    return files("penstock.inspection.html").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a content security policy names inline text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
