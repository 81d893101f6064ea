"""Headings and links of a Markdown text, as Python-Markdown reads them."""

import re
import unicodedata
from collections.abc import Iterator

FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
HTML_LINK = re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=\"([^\"]+)\"")


_REQUEST = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio)\b[^>]*?\b(?:src|srcset|href)=[\"']?(?:https?:)?//[^>]+>"
)
_NAMED_ONLY = re.compile(r"\brel=[\"']?(?:canonical|prev|next|alternate)\b")


def requests(html: str) -> list[str]:
    """The tags of a page for which a browser asks another host; links that a reader follows are no
    such tags.
    """
    return [tag for tag in _REQUEST.findall(html) if not _NAMED_ONLY.search(tag)]


def anchor(heading: str) -> str:
    """The anchor of a heading without markup; equal ones get `_1`, `_2`, … on a page."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors(text: str) -> set[str]:
    """The anchors of a page: its headings, and ids that are written out."""
    found: list[str] = re.findall(r"\bid=\"([^\"]+)\"", text) + re.findall(
        r"\{ *#([\w.-]+)[^}]*\}", text
    )
    seen = set(found)
    for heading in _headings(text):
        name, number = anchor(heading), 0
        while (one := name if number == 0 else f"{name}_{number}") in seen:
            number += 1
        seen.add(one)
    return seen


def links(text: str) -> Iterator[tuple[int, str]]:
    """(line, target) of the links and pictures of a page, except those to other hosts."""
    plain = _without_code(text)
    for pattern, group in ((LINK, 3), (HTML_LINK, 1)):
        for found in pattern.finditer(plain):
            if not re.match(r"[a-z]+:", found[group]):
                yield plain[: found.start()].count("\n") + 1, found[group]


def _headings(text: str) -> Iterator[str]:
    for line in _without_fences(text).splitlines():
        if found := re.match(r"#{1,6} +(.*?)(?: +#+)?(?: *\{[^}]*\})?$", line):
            yield re.sub(r"[`*]", "", LINK.sub(lambda link: link[2], found[1]))


def _without_fences(text: str) -> str:
    return FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)


def _without_code(text: str) -> str:
    """The text without code, on the same lines."""
    return re.sub(r"(`+)(?!`)(?:(?!\1)[^\n])+\1(?!`)", "", _without_fences(text))
