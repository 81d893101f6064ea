"""Plain text as Markdown."""

import re


def cell(text: str) -> str:
    """A text on one line, for a cell of a table. Code stays code; elsewhere a bar or a tag would end or vanish."""
    parts = " ".join(str(text).split()).split("`")
    plain = [re.sub(r"([|<*])", _escaped, part) for part in parts[::2]]
    code = [part.replace("|", "\\|") for part in parts[1::2]]
    return "`".join(part for pair in zip(plain, [*code, None], strict=False) for part in pair if part is not None)


def code(text: str) -> str:
    """A text as code in a cell."""
    return cell(f"`{text}`")


def _escaped(found: re.Match[str]) -> str:
    return {"|": "&#124;", "<": "&lt;", "*": "\\*"}[found[1]]
