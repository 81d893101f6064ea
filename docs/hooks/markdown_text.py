"""Plain text as Markdown."""

import re


def cell(text: str) -> str:
    """A text on one line, for a cell of a table. Outside of code, a bar would end the cell and a
    tag would vanish.
    """
    parts = " ".join(str(text).split()).split("`")
    parts[::2] = [
        re.sub(r"[|<*]", lambda found: f"&#{ord(found[0])};", part) for part in parts[::2]
    ]
    return "`".join(parts)


def code(text: str) -> str:
    """A text as code in a cell."""
    return cell(f"`{text}`")
