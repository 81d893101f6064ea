"""The chat page: one document with its style and script inside, which talks to `/v1` and to nothing else.

What a model or a user writes becomes text nodes only, never HTML. The page's policy lets no script run but the one
whose hash it names, and no address be asked but its own server's.
"""

import base64
import hashlib
from functools import cache
from importlib.resources import files


@cache
def chat_page() -> tuple[str, str]:
    """(the page, its content security policy)."""
    style, script = _asset("chat.css"), _asset("chat.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return _asset("chat.html").replace("{{style}}", style).replace("{{script}}", script), policy


def _asset(name: str) -> str:
    return files("penstock.serving").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a content security policy names inline text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
