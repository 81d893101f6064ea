"""Text that Jinja escapes: `a + b` behind `|safe` or `|e` writes `&lt;` for the `<` of the part that is plain text.

transformers writes it so too, and tracing does not see it. So a traced text is laid over the plain one: the two differ
only in characters that stand escaped, once or several times, in the plain one. Costs: some tenths of a microsecond a
character, and only for renders where the two differ.
"""

import re
from itertools import groupby

from penstock.chat.traced import Run

_NAMES = {"<": "lt;", ">": "gt;", "'": "#39;", '"': "#34;"}
_ESCAPED = {character: re.compile(f"&(?:amp;)*{name}") for character, name in _NAMES.items()}
_AMPERSAND = re.compile("&((?:amp;)*)")


def lay_over(text: str, runs: tuple[Run, ...], escaped: str) -> tuple[Run, ...] | None:
    """The runs of `escaped`, which is `text` with some characters escaped; None where it is something else.

    An escaped character keeps its message and field, and gives up its offset.
    """
    widths, at = [], 0
    for place in range(len(text)):
        widths.append(_width(text, place, escaped, at))
        if not widths[-1]:
            return None
        at += widths[-1]
    return _widen(runs, widths) if at == len(escaped) else None


def _width(text: str, place: int, escaped: str, at: int) -> int:
    """How many characters of `escaped` stand for one of `text`; 0 where they are no form of it."""
    character = text[place]
    if character == "&":
        was, now = _AMPERSAND.match(text, place), _AMPERSAND.match(escaped, at)
        return 0 if was is None or now is None else 1 + max(len(now[1]) - len(was[1]), 0)
    if escaped.startswith(character, at):
        return 1
    found = _ESCAPED[character].match(escaped, at) if character in _ESCAPED else None
    return len(found[0]) if found else 0


def _widen(runs: tuple[Run, ...], widths: list[int]) -> tuple[Run, ...]:
    wider: list[Run] = []
    at = 0
    for length, message, field, offset, owner, generated in runs:
        for same, places in groupby(range(length), lambda place, at=at: widths[at + place] == 1):  # type: ignore[misc]
            chosen = list(places)
            width = sum(widths[at + place] for place in chosen)
            first = offset + chosen[0] if same and offset >= 0 else -1
            wider.append((width, message, field, first, owner, generated))
        at += length
    return tuple(wider)
