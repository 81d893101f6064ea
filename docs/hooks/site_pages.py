"""Hooks of MkDocs: adds the generated pages, and leads links to files of the repository to their pages."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generated import generated_pages  # noqa: E402  (MkDocs knows this folder only while it loads this file)
from mkdocs.structure.files import File  # noqa: E402
from repository_pages import moved_links  # noqa: E402


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    generated_pages.cache_clear()
    for place, text in generated_pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to files outside `docs` to their pages."""
    where = page.file.src_uri
    return markdown if where in generated_pages() else moved_links(markdown, f"docs/{where}", where)
