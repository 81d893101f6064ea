"""What `--help` shows: all verbs by what one wants to do, on one screen; after a verb's options,
its examples.

The list of verbs is plain data, so the first page loads neither typer nor any verb, and the
completion of verbs no verb. Examples stand in a verb's docstring, as lines below `Example:`.
Colours are used only in a terminal, and not with NO_COLOR.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
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
        "import-config": "make a run file of an axolotl configuration",
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
    dim, plain = ("\x1b[2m", "\x1b[0m") if colours else ("", "")
    heading = f" {dim}{'Example' if len(examples) == 1 else 'Examples'}{plain}"
    return "\n".join([heading, *(f"  {line}" for one in examples for line in one.splitlines()), ""])
