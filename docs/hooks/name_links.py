"""Names in running text lead to their entries: `ps.train` on every page, and `TrainSettings` within
the reference.
"""

import re
from collections import Counter
from functools import cache

from api_pages import all_names, entry_anchor, topic_of
from public_names import TOP

_TOKEN = re.compile(
    r"<(?P<end>/?)(?P<tag>a|autoref|pre|h[1-6]|summary)\b[^>]*>|<code>(?P<name>[\w.]+)(?P<call>\(\))?</code>"
)


def link_names(html: str, url: str, *, inside_reference: bool) -> str:
    """HTML in which the names of the reference are links, except in headings, links and blocks of
    code.

    Args:
        html: The content of a page.
        url: From the page to the folder of the reference, such as `../../reference/api/`.
        inside_reference: Also link names without their package.
    """
    entries = {**_full_names(), **(_bare_names() if inside_reference else {})}
    depth = 0

    def link(found: re.Match[str]) -> str:
        nonlocal depth
        if found["tag"]:
            depth += -1 if found["end"] else 1
        elif depth == 0 and (place := entries.get(found["name"])):
            return f'<a class="name" href="{url}{place}">{found[0]}</a>'
        return found[0]

    return _TOKEN.sub(link, html)


@cache
def _full_names() -> dict[str, str]:
    """`ps.chat.encode` and `penstock.chat.encode` → their place below the reference."""
    places = {name: f"{topic_of(name).file}/#{entry_anchor(name)}" for name in all_names()}
    return {
        shown: place
        for name, place in places.items()
        for shown in (name.shown, name.path, re.sub(r"^ps\.", f"{TOP}.", name.shown))
    }


@cache
def _bare_names() -> dict[str, str]:
    """`TrainSettings` → its place, for classes and functions whose name only one door has."""
    counts = Counter(name.name for name in all_names())
    return {
        name.name: f"{topic_of(name).file}/#{entry_anchor(name)}"
        for name in all_names()
        if counts[name.name] == 1 and name.kind == "class"
    }
