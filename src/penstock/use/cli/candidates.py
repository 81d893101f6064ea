"""What may come next on a command line, for shells that complete: verbs, options, choices, files or
folders.

A shell runs `penstock` with the words so far, the last of which is being written, and the
environment variable `_PENSTOCK_COMPLETE`. The first line of the answer says what the shell adds by
itself: `words` (nothing), `files` or `folders`. Each other line is a candidate, a tab and its
description. Verbs come from plain data; for the options of a verb, typer and this one verb are
imported, and nothing that is heavy.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.use.cli.help_pages import GROUPS

FILES = (
    "FILE",
    "PATH",
    "PATH...",
    "SOURCE",
    "TARGET",
    "RUN.YAML",
    "AXOLOTL.YAML",
    "PROMPTS",
    "CODE",
    "STUDENT",
    "TEACHER",
    "NAME=PATH",
)
FOLDERS = ("DIR", "FOLDER", "RUN", "RUN...", "DATASET", "MODEL")
"""What the name of a value says of it: that it is a file (or a folder), or a folder."""
FREE = (
    "A:B",
    "ADDRESS",
    "BYTES",
    "CHARACTER",
    "ID",
    "K",
    "KEY",
    "KEY=VALUE",
    "LIMIT",
    "MODULE:FUNCTION",
    "N",
    "NAME",
    "NAME:TYPE",
    "NUMBER",
    "P",
    "REGEX",
    "ROLES",
    "SECONDS",
    "SHARE",
    "STUDENT=TEACHER",
    "T",
    "TEXT",
    "X",
)
"""Values of which nothing is known before they are written."""
CHOICES = {
    "FORMAT": ("jsonl", "parquet", "text", "csv", "tsv", "arrow", "webdataset", "imagefolder"),
    "--device": ("auto", "cpu", "cuda", "xpu", "mps"),
    "--task": (
        "mmlu",
        "gsm8k",
        "humaneval",
        "humaneval_plus",
        "mbpp",
        "mbpp_plus",
        "bits_per_byte",
        "lm-eval:",
    ),
    "--roles-to-train": ("assistant", "user", "system", "tool"),
}
"""Name of a value, or option, that has choices which its help lists."""
Candidates = list[tuple[str, str]]
CommandOf = Callable[[str], Any]


def answer(words: Sequence[str], command_of: CommandOf) -> int:
    """Print what a shell needs to complete the last of these words, without the command's name; the
    exit code.
    """
    kind, found = complete(words, command_of)
    print(kind)
    for value, note in found:
        print(f"{value}\t{note}")
    return 0


def complete(words: Sequence[str], command_of: CommandOf) -> tuple[str, Candidates]:
    """What may stand in place of the last word.

    Args:
        words: Those so far, without the command's name; the last is being written.
        command_of: Gives the Typer command of a verb.

    Returns:
        `words`, `files` or `folders`, and candidates that begin with the word, with their
        descriptions.
    """
    *before, word = _split_at_equals(list(words) or [""])
    verb = next((one for one in before if not one.startswith("-")), None)
    if verb is None:
        flags = [("--help", "show this page"), ("--version", "print the version")]
        verbs = [pair for group in GROUPS.values() for pair in group.items()]
        return "words", _fitting(flags if word.startswith("-") else verbs, word)
    command = command_of(verb) if any(verb in verbs for verbs in GROUPS.values()) else None
    if command is None:
        return "words", []
    rest = before[before.index(verb) + 1 :]
    while hasattr(command, "commands"):
        name = next((one for one in rest if not one.startswith("-")), None)
        if name is None:
            inner = [(name, _sentence(one.help)) for name, one in command.commands.items()]
            return "words", _fitting([("--help", "")] if word.startswith("-") else inner, word)
        if name not in command.commands:
            return "words", []
        command, rest = command.commands[name], rest[rest.index(name) + 1 :]
    return _complete_verb(command, rest, word)


def _complete_verb(command: Any, before: Sequence[str], word: str) -> tuple[str, Candidates]:
    """What may come after the words of one verb."""
    options = {
        flag: one
        for one in command.params
        if _is_option(one)
        for flag in (*one.opts, *one.secondary_opts)
    }
    flag, equals, begun = word.partition("=")
    if equals and flag in options:
        # A shell that takes an option and its value as one word wants them back as one.
        kind, found = _values(options[flag], begun)
        return kind, [(f"{flag}={value}", note) for value, note in found]
    takes_value = before and before[-1] in options and not options[before[-1]].is_flag
    if takes_value:
        return _values(options[before[-1]], word)
    if word.startswith("-"):
        offered = [
            (name, _sentence(one.help))
            for name, one in options.items()
            if name.startswith("--") and (one.multiple or not set(one.opts) & set(before))
        ]
        return "words", _fitting([*offered, ("--help", "Show options and an example")], word)
    arguments = [one for one in command.params if not _is_option(one)]
    place = _num_positional(before, options)
    if not arguments or (place >= len(arguments) and arguments[-1].nargs == 1):
        return "words", []
    return _values(arguments[min(place, len(arguments) - 1)], word)


def _values(param: Any, word: str) -> tuple[str, Candidates]:
    """What the value of an option or argument may be."""
    kind, choices = value_kind(str(param.metavar), param.opts)
    return kind, _fitting(((choice, "") for choice in choices), word)


def value_kind(name: str, flags: Sequence[str] = ()) -> tuple[str, Sequence[str]]:
    """What the name of a value (`FILE`, `stop|skip`, `PATH|auto`) says of it: the kind for the
    shell, and choices.

    Raises:
        KeyError: Nothing is known of this name; add it to one of the lists above.
    """
    for key in (*flags, name):
        if key in CHOICES:
            return "words", CHOICES[key]
    if "|" in name:
        parts = name.split("|")
        kinds = [value_kind(part)[0] for part in parts if part.isupper()]
        return (kinds or ["words"])[0], [part for part in parts if not part.isupper()]
    if name in FILES or name in FOLDERS:
        return ("files" if name in FILES else "folders"), ()
    if name in FREE:
        return "words", ()
    raise KeyError(name)


def _split_at_equals(words: list[str]) -> list[str]:
    """bash gives an option with = and a value as three words: leave out the middle one."""
    if words[-1] == "=":
        return [*words[:-1], ""]
    return [word for word in words[:-1] if word != "="] + words[-1:]


def _num_positional(before: Iterable[str], options: dict[str, Any]) -> int:
    """Number of words that are neither options nor their values."""
    count, is_value = 0, False
    for word in before:
        known = options.get(word)
        count += not is_value and not word.startswith("-")
        is_value = known is not None and not known.is_flag
    return count


def _is_option(param: Any) -> bool:
    return any(flag.startswith("-") for flag in param.opts)


def _fitting(found: Iterable[tuple[str, str]], word: str) -> Candidates:
    return [(value, note) for value, note in found if value.startswith(word)]


def _sentence(text: str | None) -> str:
    """The first sentence of a help text, on one line."""
    line = " ".join((text or "").split()).replace("`", "")
    return re.split(r"[.;:] |\.$", line, maxsplit=1)[0]
