"""What `--help` shows: all verbs by what one wants to do, on one screen; after a verb's options,
its examples.

The list of verbs is plain data, so the first page loads neither typer nor any verb, and the
completion of verbs no verb. The page of a verb is written here, because Typer's own imports rich's
Markdown and pydantic, which takes longer than all else. Examples stand in a verb's docstring, as
lines below `Example:`. Colours are used only in a terminal, and not with NO_COLOR.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from inspect import cleandoc
from typing import Any

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Prepare data": {
        "tokenizer": "train a tokenizer, add control tokens, describe one",
        "prepare": "turn text or conversations into a dataset",
        "convert": "datasets from and to Megatron's format, from .npy",
        "copy": "copy datasets between folders and object stores",
        "verify": "check datasets against their checksums",
    },
    "Look at it": {
        "inspect": "show chats, datasets and rows as they are trained",
        "plan": "see what a mixture gives, before training",
        "plot": "draw the curves of one or several runs",
    },
    "Train": {
        "train": "train a model as a run file says",
        "distill": "audit and prepare learning from a teacher",
        "reference": "store a reference model's log-probabilities",
        "rollouts": "sample and judge answers that a policy learns from",
        "import-config": "make a run file of axolotl, TRL, LLaMA-Factory",
        "schema": "print the schema of run files, for editors",
    },
    "Use a model": {
        "eval": "measure loss on held-out data, and benchmarks",
        "generate": "write text",
        "chat": "chat in the terminal",
        "serve": "serve an OpenAI-compatible API and a chat page",
        "export": "write a folder for transformers, vLLM, llama.cpp",
    },
    "Environment": {
        "doctor": "report what is installed here and what works",
    },
}
"""What one wants to do → its verbs, in the order in which they are used, each with at most 50
characters.
"""
VERBS = tuple(verb for verbs in GROUPS.values() for verb in verbs)
"""In the order of `--help`."""

_WIDEST_PAGE, _WIDEST_NAME = 100, 32
"""Columns of a verb's page at most, and of its options with their values."""

HEAD = "Example:"
"""Line of a docstring below which its examples stand, indented, one a line; a backslash continues
one.
"""

USAGE = "Usage: penstock VERB …     penstock VERB --help shows its options and an example"
_LINES = sum(map(len, GROUPS.values())) + len(GROUPS) + 5
"""Lines of the page with an empty line between groups."""


def colourful(stream: Any) -> bool:
    """Whether to write colours to a stream."""
    return (
        bool(stream.isatty()) and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    )


def overview(*, colours: bool, lines: int | None = None) -> str:
    """The first page, at most 80 columns wide.

    Args:
        colours: Whether headings and verbs are coloured.
        lines: Height of the terminal, to leave out empty lines where it is low; None: as they look
            best.
    """
    bold, verb_colour, plain = ("\x1b[1m", "\x1b[36m", "\x1b[0m") if colours else ("", "", "")
    airy = lines is None or lines > _LINES
    page = [USAGE, ""] if airy else [USAGE]
    for group, verbs in GROUPS.items():
        for number, (verb, summary) in enumerate(verbs.items()):
            heading = group if number == 0 else ""
            page.append(f"{bold}{heading:<14}{plain}{verb_colour}{verb:<15}{plain}{summary}")
        page += [""] if airy else []
    end = "--version prints the version; --install-completion lets your shell complete."
    return "\n".join([*page, end] if airy else page)


def show_overview() -> str:
    """The first page as it suits standard output."""
    terminal = sys.stdout.isatty()
    return overview(
        colours=colourful(sys.stdout), lines=shutil.get_terminal_size().lines if terminal else None
    )


def verb_page(command: Any, name: str, *, colours: bool, width: int) -> str:
    """The page of a verb, or of a group of verbs.

    Args:
        command: As Typer made it of the verb's function.
        name: What is typed for it, such as "penstock tokenizer train".
        colours: Whether headings and options are coloured.
        width: Columns of the terminal.
    """
    text, examples = split_help(cleandoc(command.help or ""))
    verbs = getattr(command, "commands", {})
    arguments = [one for one in command.params if not one.opts[0].startswith("-")]
    usage = [name, *(_argument(one) for one in arguments), "VERB …" if verbs else "[OPTIONS]"]
    lists: dict[str, list[tuple[str, str]]] = {}
    for one in arguments:
        lists.setdefault("Arguments", []).append((_argument(one), _meaning(one)))
    for one in command.params:
        if one not in arguments and not getattr(one, "hidden", False):
            panel = getattr(one, "rich_help_panel", None) or "Options"
            lists.setdefault(panel, []).append((_option(one), _meaning(one)))
    for verb, inner in verbs.items():
        summary = cleandoc(inner.help or "").partition("\n\n")[0]
        lists.setdefault("Verbs", []).append((verb, summary))
    lists.setdefault("Options", []).append(("-h, --help", "Show this page and exit."))
    lines = [f"Usage: {' '.join(usage)}", ""]
    for paragraph in text.split("\n\n"):
        lines += [*_wrapped(paragraph, width), ""]
    for heading, rows in lists.items():
        lines += [_heading(heading, colours=colours), *_rows(rows, colours, width), ""]
    shown = examples_text(examples, colours=colours) if examples else ""
    return "\n".join(lines) + "\n" * bool(examples) + shown


def _argument(one: Any) -> str:
    shown: str = one.metavar or one.name.upper()
    shown += "..." if one.nargs == -1 and "..." not in shown else ""
    return shown if one.required or shown.startswith("[") else f"[{shown}]"


def _option(one: Any) -> str:
    """An option as it is typed, its letter first, with the word for its value."""
    names = sorted([*one.opts, *one.secondary_opts], key=lambda name: name.startswith("--"))
    return f"{', '.join(names)} {one.metavar or ''}".rstrip()


def _meaning(one: Any) -> str:
    variable = f" [environment: {one.envvar}]" if getattr(one, "envvar", None) else ""
    return f"{one.help or ''}{variable}{' [required]' * bool(one.required)}"


def _rows(rows: Sequence[tuple[str, str]], colours: bool, width: int) -> Iterator[str]:
    """Names with their meaning in a column; below a name that is too long for its own."""
    colour, plain = ("\x1b[36m", "\x1b[0m") if colours else ("", "")
    wide = 2 + min(max(len(name) for name, _ in rows) + 2, _WIDEST_NAME, width // 2)
    for name, meaning in rows:
        texts = _wrapped(meaning, width - wide) or [""]
        first, *rest = ["", *texts] if len(name) + 4 > wide else texts
        yield f"  {colour}{name}{plain}{' ' * (wide - 2 - len(name)) if first else ''}{first}"
        yield from (" " * wide + line for line in rest)


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of a text, without Markdown's marks of code; options are not broken."""
    return textwrap.wrap(re.sub(r"`([^`]+)`", r"\1", text), width, break_on_hyphens=False)


def _heading(words: str, *, colours: bool) -> str:
    dim, plain = ("\x1b[2m", "\x1b[0m") if colours else ("", "")
    return f" {dim}{words}{plain}"


def show_verb(command: Any, name: str) -> str:
    """The page of a verb as it suits standard output; arguments as for `verb_page`."""
    width = min(shutil.get_terminal_size().columns, _WIDEST_PAGE)
    return verb_page(command, name, colours=colourful(sys.stdout), width=width)


def split_help(text: str) -> tuple[str, list[str]]:
    """A docstring's text without its examples, and the examples, each with its continued lines."""
    before, found, after = text.partition(f"\n{HEAD}\n")
    if not found:
        return text, []
    examples: list[str] = []
    for line in (line.strip() for line in after.splitlines()):
        if examples and examples[-1].endswith("\\"):
            examples[-1] += f"\n    {line}"
        elif line:
            examples.append(line)
    return before.rstrip(), examples


def examples_text(examples: Sequence[str], *, colours: bool) -> str:
    """Examples as lines that can be copied into a shell: nothing stands in front of or behind them
    but spaces.
    """
    heading = _heading("Example" if len(examples) == 1 else "Examples", colours=colours)
    return "\n".join([heading, *(f"  {line}" for one in examples for line in one.splitlines()), ""])
