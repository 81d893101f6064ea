"""The documentation holds together without being built: links and anchors, generated references,
drawings.
"""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from penstock.use.cli import VERBS, build_app
from penstock.use.config import load_run, run_schema

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS / "hooks"))

import cli_pages  # noqa: E402
import file_pages  # noqa: E402
import name_links  # noqa: E402
import public_names  # noqa: E402
import run_file_pages  # noqa: E402
from generated import generated_pages  # noqa: E402
from markdown_links import anchor, anchors, links, requests  # noqa: E402
from repository_pages import ROOT as REPOSITORY  # noqa: E402
from repository_pages import moved_links, place  # noqa: E402

WRITTEN = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(DOCS.rglob("*.md")),
]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Place below `docs` → Markdown, of all pages of the site but those of single files."""
    written = {
        path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8")
        for path in DOCS.rglob("*.md")
    }
    return {
        **written,
        **{name: text for name, text in generated_pages().items() if name.endswith(".md")},
    }


def _dead(folder: Path, text: str, own: str, pages: dict[str, str]) -> Iterator[str]:
    """The links of a page in `folder` that lead nowhere. Generated pages are where they will be."""
    for line, link in links(text):
        path, sign, wanted = link.partition("#")
        target = (folder / path).resolve() if path else None
        inside = (
            target.relative_to(DOCS).as_posix() if target and target.is_relative_to(DOCS) else None
        )
        if target and inside not in pages and not target.exists():
            yield f"{line}: {link} does not exist"
        elif sign:
            there = (
                own
                if target is None
                else pages.get(inside or "") or target.read_text(encoding="utf-8")
            )
            if wanted not in anchors(there) and not re.search(
                rf"^::: {re.escape(wanted)}$", there, re.MULTILINE
            ):
                yield f"{line}: {link} has no such heading"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_anchors_lead_somewhere(page, pages):
    text = page.read_text(encoding="utf-8")
    assert list(_dead(page.parent, text, text, pages)) == []


def test_links_of_generated_pages_lead_somewhere(pages):
    made = {name: text for name, text in generated_pages().items() if name.endswith(".md")}
    dead = {
        name: list(_dead((DOCS / name).parent, text, text, pages)) for name, text in made.items()
    }
    assert {name: found for name, found in dead.items() if found} == {}


def test_dead_links_and_anchors_are_found(pages):
    text = "# A b\n\n[x](no.md) [y](#a-b) `[code](no)` [z](#a-c)\n\n"
    text += "```md\n[fence](no)\n```\n![p](no.png) [r](log.md#nowhere)\n"
    found = list(_dead(DOCS, text, text, pages))
    assert found == [
        "3: no.md does not exist",
        "3: #a-c has no such heading",
        "8: no.png does not exist",
        "8: log.md#nowhere has no such heading",
    ]


def test_every_page_is_reached_from_the_first(pages):
    """By links. An index stands for its folder, whose pages the site lists next to it."""
    found, waiting = set(), ["index.md"]
    while waiting:
        name = waiting.pop()
        if name in found or name not in pages:
            continue
        found.add(name)
        folder = (DOCS / name).parent
        targets = [(folder / link.partition("#")[0]).resolve() for _, link in links(pages[name])]
        waiting += [
            place(one.relative_to(ROOT).as_posix()) for one in targets if one.is_relative_to(ROOT)
        ]
        if name.endswith("/index.md"):
            waiting += [other for other in pages if Path(other).parent == Path(name).parent]
            waiting += [other for other in pages if Path(other).parent.parent == Path(name).parent]
    assert sorted(set(pages) - found) == []


def test_each_page_has_one_title(pages):
    """Fences are skipped, where a comment begins like a title."""
    titles = {
        name: len(
            re.findall(
                r"^# ",
                re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL),
                re.MULTILINE,
            )
        )
        for name, text in pages.items()
    }
    assert {name: count for name, count in titles.items() if count != 1} == {}


def test_nothing_generated_is_checked_in():
    listed = subprocess.run(
        ["git", "ls-files", "docs"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    assert set(listed.split()) & {f"docs/{name}" for name in generated_pages()} == set()


def test_every_public_name_has_one_entry():
    """Compared with what the doors list when they are imported; those that need a trainer, by their
    source.
    """
    entries = [
        line.removeprefix("::: ")
        for name, text in generated_pages().items()
        if name.startswith("reference/api/")
        for line in text.splitlines()
        if line.startswith("::: ")
    ]
    doors = public_names.doors()
    wanted = []
    for door in doors:
        try:
            names = import_module(door).__all__
        except ImportError:
            names = [one.name for one in public_names.public_names(door)]
        wanted += [f"{door}.{name}" for name in names]
    missing = {
        name
        for name in wanted
        if name not in entries
        and name not in doors
        and _module_home(name) not in {*entries, *doors}
    }
    assert missing == set()
    assert len(entries) == len(set(entries))


def _module_home(path: str) -> str:
    """Where a module that a door lists is defined."""
    door, _, name = path.rpartition(".")
    return next(one.home for one in public_names.public_names(door) if one.name == name)


def test_the_map_has_every_file():
    files = sorted(path.name for path in (ROOT / "src").rglob("*.py"))
    rows = [
        line.split(" | ")
        for line in file_pages.file_pages()[file_pages.PAGE].splitlines()
        if line.startswith("| `")
    ]
    assert sorted(name.strip("|` ") for name, *_ in rows) == files
    assert [name for name, text in rows if len(text) < 12] == []


def test_first_sentences():
    assert public_names.first_sentence("One line.") == "One line."
    assert public_names.first_sentence(
        "Spans (Raffel et al. 2020), e.g. two.\nMore here. No.\n\nNo."
    ) == ("Spans (Raffel et al. 2020), e.g. two.")
    assert public_names.first_sentence("Of version 0.1") == "Of version 0.1"
    assert public_names.first_sentence(None) == ""


def test_every_option_of_every_command_is_in_the_reference():
    page = generated_pages()[cli_pages.PAGE]
    sections = dict(
        re.findall(r"^##+ (penstock[a-z -]+)\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    )
    command = get_command(build_app([]))
    commands = {f"penstock {verb}": command.commands[verb] for verb in VERBS}
    for name, one in list(commands.items()):
        commands |= {
            f"{name} {inner}": made for inner, made in getattr(one, "commands", {}).items()
        }
    assert set(sections) == set(commands)
    missing = [
        f"{name} {option}"
        for name, one in commands.items()
        if not hasattr(one, "commands")
        for param in one.params
        if not getattr(param, "hidden", False)
        for option in (*param.opts, *param.secondary_opts)
        if option.startswith("-") and f"`{option}`" not in sections[name]
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("text", "left", "examples"),
    [
        ("Do it.", "Do it.", ""),
        ("Do it.\n\nExample:\n    penstock do it", "Do it.", "penstock do it"),
        (
            "Do it.\n\nExamples:\n  penstock a\n  penstock b \\\n    --c\n\nMore.",
            "Do it.\n\nMore.",
            "penstock a\npenstock b \\\n  --c",
        ),
    ],
)
def test_examples_of_help_texts_become_code(text, left, examples):
    assert cli_pages.split_examples(text) == (left, examples)


def test_every_key_of_the_run_file_is_in_the_reference():
    page, schema = generated_pages()[run_file_pages.PAGE], run_schema()
    shown = set(re.findall(r"^\| \[?`(\w+)`", page, re.MULTILINE))
    keys = {
        key for settings in (schema, *schema["$defs"].values()) for key in settings["properties"]
    }
    assert keys - shown == set()
    rows = sum(len(settings["properties"]) for settings in (schema, *schema["$defs"].values()))
    assert len(re.findall(r"^\| \[?`\w+`", page, re.MULTILINE)) == rows, (
        "each class is described once"
    )
    assert "| `share` | number or `tokens` | `1.0` | Share of the tokens" in page
    assert "| `path` | text or list of: text | **required** |" in page


def test_the_run_file_of_the_reference_is_one(tmp_path):
    text = re.search(r"```yaml\n(.*?)```", run_file_pages.INTRODUCTION, re.DOTALL)
    path = tmp_path / "run.yaml"
    path.write_text(text[1])
    run = load_run(path)
    assert (run.training.steps, [source.share for source in run.data.sources]) == (2000, [0.7, 0.3])


def test_anchors_are_those_of_the_site():
    markdown = pytest.importorskip("markdown.extensions.toc")
    for heading in (
        "Équal, and `more`",
        "a_b c--d  e",
        "data.sources[].objective: denoise",
        "1,024 ranks (×2)",
    ):
        assert anchor(heading) == markdown.slugify(heading, "-")
    text = "# One\n## Two `x`\n## Two x\n```\n# not\n```\n## [Named](a.md) {#own}\n"
    assert anchors(text) == {"own", "one", "two-x", "two-x_1", "named"}


def test_links_to_files_of_the_repository_lead_to_their_pages():
    text = "[a](../../examples/run.yaml) [b](storage.md#x) [c](../../CHANGELOG.md) [d](../../no.py)"
    assert moved_links(text, "docs/how-to/load.md", "how-to/load.md") == (
        "[a](examples/run.yaml.md) [b](storage.md#x) [c](../project/changelog.md) [d](../../no.py)"
    )
    assert (
        moved_links("[e](docs/log.md#a)", "CHANGELOG.md", "project/changelog.md")
        == "[e](../log.md#a)"
    )
    assert REPOSITORY == ROOT


def test_names_in_text_become_links_and_others_stay():
    once = "<code>ps.train</code>"
    html = (
        f"<p>{once} <code>Loader</code> <code>x</code></p><h2>{once}</h2><pre>{once}</pre><a "
        f"href='x'>{once}</a>"
    )
    found = name_links.link_names(html, "../api/", inside_reference=False)
    assert found.count('class="name"') == 1
    assert '<a class="name" href="../api/train/#penstock.train"><code>ps.train</code></a>' in found
    assert name_links.link_names(html, "", inside_reference=True).count('class="name"') == 2
    assert 'href="trainers/#penstock.integrations.trl.SFTTrainer"' in name_links.link_names(
        "<code>ps.trl.SFTTrainer</code>", "", inside_reference=False
    )


@pytest.mark.parametrize(
    "path", sorted((DOCS / "pictures").glob("*.svg")), ids=lambda path: path.stem
)
def test_drawings_say_what_they_show_and_need_nothing_else(path):
    """With the colours of the site for each class that they use, as the site puts them into its
    pages.
    """
    root = ElementTree.parse(path).getroot()
    if root.get("class") != "drawing":
        pytest.skip("not a drawing of these pages")
    assert len(root.get("aria-label", "")) > 40
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"(?:href|src)=\"(?!#)|url\((?!#)|@import", text) == []
    used = {name for element in root.iter() for name in element.get("class", "").split()} - {
        "drawing"
    }
    styles = (DOCS / "assets" / "site.css").read_text(encoding="utf-8")
    assert {
        name for name in used if f".drawing .{name} " not in styles or f".{name}{{" not in text
    } == set()


def test_requests_to_other_hosts_are_found():
    own = (
        '<link rel="canonical" href="https://a.b/"><script src="x.js"></script><a '
        'href="https://a.b">a</a>'
    )
    asked = [
        '<script async src="https://a.b/c.js">',
        "<link rel=stylesheet href=//a.b/c.css>",
        '<img src="http://a.b/c.png"/>',
    ]
    assert requests(own) == []
    assert requests(own + "".join(asked)) == asked


def test_the_site_takes_nothing_from_other_hosts():
    class Loader(yaml.SafeLoader):
        """Reads tags of MkDocs as nothing."""

    Loader.add_multi_constructor("!", lambda *_: None)
    settings: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    assert settings["theme"]["font"] is False
    assert settings["strict"] is True
    assert [key for key in ("repo_url", "site_url") if key in settings] == []
    own = [*settings["extra_css"], *settings["extra_javascript"]]
    assert own == ["assets/site.css", "assets/site.js"]
    for name in own:
        text = (DOCS / name).read_text(encoding="utf-8")
        assert re.findall(r"url\(|@import|https?:|fetch|XMLHttp|import\(", text) == []
