"""Hooks of MkDocs: generated pages, links to files of the repository, pictures, and the selector of
versions.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

from api_pages import FOLDER
from generated import generated_pages
from markdown_links import requests
from name_links import link_names
from notebook_pages import FOLDER as NOTEBOOKS
from notebook_pages import page_links
from repository_pages import ROOT, moved_links

_DRAWING = re.compile(r"^!\[([^\]]*)\]\((\S+\.svg)\)$", re.MULTILINE)
_PICTURE = re.compile(r"^!\[([^\]]*)\]\((\S+)\.png\)$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """A build without `mike` has no list of versions; the page would ask for one in vain."""
    if "MIKE_DOCS_VERSION" not in os.environ:
        config.extra.pop("version", None)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    generated_pages.cache_clear()
    for place, text in generated_pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to files outside `docs` to their pages, and put drawings into the page."""
    where = page.file.src_uri
    if where in generated_pages():
        if not where.startswith(NOTEBOOKS):
            return markdown
    else:
        markdown = page_links(moved_links(markdown, f"docs/{where}", where), where)
    text = _DRAWING.sub(lambda found: _drawing(where, *found.groups()), markdown)
    text = _PICTURE.sub(lambda found: _picture(where, *found.groups()), text)
    if 'class="picture"' in text:
        page.meta.setdefault("hide", []).append("toc")
    return text


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Link the names of the reference, and leave source code and labels out of the search."""
    url = get_relative_url(f"{FOLDER}/", page.url)
    html = re.sub(
        r'<(details class="mkdocstrings-source"|small class="doc doc-labels")',
        r"<\1 data-search-exclude",
        html,
    )
    return link_names(html, url, inside_reference=page.file.src_uri.startswith("reference/"))


def on_post_build(config: Any) -> None:
    """Refuse a site that asks another host for anything; links that a reader follows are no such
    thing.
    """
    for page in Path(config.site_dir).rglob("*.html"):
        if found := requests(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page}: asks another host: {found[0]}")


def _drawing(where: str, text: str, target: str) -> str:
    """A drawing as part of the page, where it follows the reader's choice of light or dark.

    As a file of its own it has colours of its own; here those of `assets/site.css` apply.
    """
    svg = (ROOT / "docs" / where).parent.joinpath(target).read_text(encoding="utf-8")
    if 'class="drawing"' not in svg:
        return f"![{text}]({target})"
    plain = re.sub(r"<style>.*?</style>|^ +|\n(?=\n)", "", svg, flags=re.DOTALL | re.MULTILINE)
    return f'<figure class="picture">\n{plain.strip()}\n</figure>\n'


def _picture(where: str, text: str, target: str) -> str:
    """A picture of a page, and where there is one, the same page in dark, of which the site shows
    what suits its own colours.
    """
    if not (ROOT / "docs" / where).parent.joinpath(f"{target}.dark.png").is_file():
        return f"![{text}]({target}.png)"
    lazy = "{ loading=lazy }"
    return f"![{text}]({target}.png#only-light){lazy}\n![{text}]({target}.dark.png#only-dark){lazy}"
