"""The pages of the Python reference: every public name, on the page of what one wants to do with
it.

A page has directives of mkdocstrings, which reads the source with griffe and imports nothing. A
name that `penstock` lists goes to the page of the room that defines it; a new room without a page
gets the page `other`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import final

from markdown_text import cell
from public_names import TOP, PublicName, doors, module_docstring, public_names

FOLDER = "reference/api"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One page of the reference."""

    file: str
    """Name of the file, without suffix."""
    title: str
    """What one wants to do."""
    text: str
    """One paragraph in Markdown."""
    rooms: tuple[str, ...]
    """The rooms whose names are on this page."""


TOPICS = (
    Topic(
        file="prepare",
        title="Prepare data",
        text="Raw records become datasets of tokens. How: [prepare data](../../how-to/prepare.md).",
        rooms=("prepare", "reports", "tokenizers", "sources"),
    ),
    Topic(
        file="chats",
        title="Chats and their masks",
        text=(
            "Conversations become tokens with loss weights and a certificate. How: [prepare "
            "chats](../../how-to/chats.md); why it can be trusted: [how masks are "
            "proven](../../explanation/masks.md)."
        ),
        rooms=("chat",),
    ),
    Topic(
        file="media",
        title="Images and sounds",
        text="How: [images](../../how-to/images.md).",
        rooms=("media",),
    ),
    Topic(
        file="datasets",
        title="Read and write datasets",
        text=(
            "Documents of tokens on disk or in a store: open, write, check, copy and convert "
            "them. How: [object stores](../../how-to/storage.md)."
        ),
        rooms=("shards",),
    ),
    Topic(
        file="load",
        title="Mix, pack and load",
        text=(
            "Datasets become steps of packed rows. How: [load rows](../../how-to/load.md); why it "
            "is exact: [how a mixture is planned](../../explanation/mixtures.md)."
        ),
        rooms=("loader", "inputs", "packing", "sampling"),
    ),
    Topic(
        file="objectives",
        title="Objectives",
        text=(
            "What is trained on a document: the next token, denoising, infilling, or your own. "
            "How: [objectives](../../how-to/objectives.md)."
        ),
        rooms=("objectives",),
    ),
    Topic(
        file="look",
        title="Look at data and rows",
        text="Datasets, rows and plans, in a terminal, as a page or as values.",
        rooms=("inspection",),
    ),
    Topic(
        file="models",
        title="Models",
        text="Build, load, check and export models that keep the documents of a row apart. "
        "[Which models do](../isolation.md).",
        rooms=("models",),
    ),
    Topic(
        file="train",
        title="Train, and use what was trained",
        text=(
            "How: [training from Python](../../how-to/training.md). Each setting is also a key of "
            "the [run file](../run-file.md)."
        ),
        rooms=("runs", "training", "config"),
    ),
    Topic(
        file="distill",
        title="Distill",
        text=(
            "Learn from teachers, whatever their tokenizers. How: "
            "[distillation](../../how-to/distillation.md)."
        ),
        rooms=("distillation",),
    ),
    Topic(
        file="generate",
        title="Generate and serve",
        text="How: [a server with OpenAI's API](../../how-to/serving.md).",
        rooms=("generation", "serving"),
    ),
    Topic(
        file="evaluate",
        title="Evaluate",
        text=(
            "Tasks, scores and their standard errors. How: "
            "[evaluation](../../how-to/evaluation.md)."
        ),
        rooms=("evaluation",),
    ),
    Topic(
        file="trainers",
        title="Other people's trainers",
        text=(
            "Working parts for trainers and frameworks. How: [one page for "
            "each](../../how-to/trainers/index.md)."
        ),
        rooms=("integrations",),
    ),
    Topic(
        file="errors",
        title="Errors",
        text=(
            "What penstock raises on purpose. A message says where, what was found, what was "
            "expected, and the cure."
        ),
        rooms=("core",),
    ),
    Topic(
        file="other",
        title="The command line from Python",
        text="Rarely needed: the application behind [the command `penstock`](../cli.md).",
        rooms=("cli",),
    ),
)
MOVED = {
    "check_isolation": "models",
    "build_model": "models",
    "load_model": "models",
    "inspect": "look",
}
"""Name at the top → its page, where another room defines it."""


def topic_of(name: PublicName) -> Topic:
    """The page of a name."""
    rooms = (name.home if name.door == TOP else name.door).split(".")[1:3]
    wanted = MOVED.get(name.name) if name.door == TOP else None
    found = (
        topic
        for topic in TOPICS
        if topic.file == wanted or (wanted is None and {*rooms} & {*topic.rooms})
    )
    return next(found, TOPICS[-1])


def api_pages() -> dict[str, str]:
    """Place below `docs` → Markdown: a page for each topic, and the index of all names."""
    pages = {f"{FOLDER}/{topic.file}.md": "\n".join(_page(topic)) for topic in TOPICS}
    order = "\n".join(f"  - {topic.file}.md" for topic in TOPICS)
    return {
        f"{FOLDER}/index.md": "\n".join(_index()),
        **pages,
        f"{FOLDER}/.nav.yml": f"title: Python\nnav:\n  - index.md\n{order}\n",
    }


@cache
def all_names() -> tuple[PublicName, ...]:
    """Every public name. A module that is a door stands for its own names."""
    listed = doors()
    return tuple(name for door in listed for name in public_names(door) if name.home not in listed)


def _index() -> Iterator[str]:
    yield "# Python reference"
    yield ""
    yield (
        "Every public name, by what one wants to do. `import penstock as ps` loads a name when it "
        "is first used, so"
    )
    yield "it takes milliseconds and needs neither torch nor transformers."
    for topic in TOPICS:
        yield f"\n## [{topic.title}]({topic.file}.md)\n"
        yield "| name | what it is |"
        yield "|---|---|"
        for name in _names_of(topic):
            yield (
                f"| [`{name.shown}`]({topic.file}.md#{entry_anchor(name)}) | {cell(name.summary)} |"
            )


def _names_of(topic: Topic) -> list[PublicName]:
    return [name for name in all_names() if topic_of(name) is topic]


def _page(topic: Topic) -> Iterator[str]:
    yield f"# {topic.title}"
    yield f"\n{topic.text}"
    by_door: dict[str, list[PublicName]] = {}
    for name in _names_of(topic):
        by_door.setdefault(name.door, []).append(name)
    for door, names in by_door.items():
        if door != TOP:
            yield f"\n## {names[0].shown.rpartition('.')[0]}\n\n{module_docstring(door)}"
        for name in sorted(names, key=_order):
            yield from _entry(name, 2 if door == TOP else 3)


def _order(name: PublicName) -> tuple[bool, bool]:
    """Functions and classes in the order of the door, then values."""
    return name.kind == "module", name.kind == "value"


def entry_anchor(name: PublicName) -> str:
    """What mkdocstrings calls the entry of a name: a module is shown at the place that defines
    it.
    """
    return name.home if name.kind == "module" else name.path


def _entry(name: PublicName, level: int) -> Iterator[str]:
    shown = name.shown if name.door == TOP else name.name
    yield f"\n::: {entry_anchor(name)}"
    yield "    options:"
    yield f"      heading_level: {level}"
    yield f'      heading: "{shown}"'
    yield f'      toc_label: "{shown}"'
