"""All pages of the site that are made when it is built; none is checked in."""

from functools import cache

from api_pages import api_pages
from cli_pages import cli_pages
from file_pages import file_pages
from notebook_pages import notebook_pages
from repository_pages import repository_pages
from run_file_pages import run_file_pages


@cache
def generated_pages() -> dict[str, str]:
    """Place below `docs` → text: Markdown, and the order of generated folders (`.nav.yml`)."""
    return {
        **api_pages(),
        **cli_pages(),
        **file_pages(),
        **run_file_pages(),
        **repository_pages(),
        **notebook_pages(),
    }
