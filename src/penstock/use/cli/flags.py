"""Settings in error messages, as one writes them on the command line.

The library's messages name settings as Python and run files do: "set on_error to skip", "roles:
{tool: [ipython]}". `as_flags` is the one place where they become options of the verb that was
called: `--on-error skip`, `--set 'roles={tool: [ipython]}'`. It changes only names that are options
of that verb, or chat settings where the verb has --set.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from penstock.use.cli.options import chat_settings

_WORD = r"[A-Za-z0-9_.%+-]+"
_ARTICLES = frozenset(("the", "a", "an", "one", "at", "where", "another", "its", "it"))
"""Words that follow "set NAME to" and are no value."""
_ASKED = "set|raise|lower|with|check|in|use|give|choose|take|leave out|remove"
"""Words before a setting that the reader is asked to change."""
_FILE_KEY = re.compile(r"\S+\.ya?ml(?::\d+)?: ")
"""The beginning of a message about a key of a file, which is changed there."""
_CHOICES = frozenset(
    (
        "error",
        "drop",
        "best",
        "tree",
        "separate",
        "keep",
        "short",
        "decode",
        "header",
        "white",
        "black",
        "ignore",
        "first",
        "copy",
        "reference",
        "all",
        "ranked",
        "none",
        "auto",
        "true",
        "false",
    )
)
"""Values of settings whose names are ordinary words."""


@final
@dataclass(frozen=True, slots=True)
class Flags:
    """What a verb calls its settings."""

    options: Mapping[str, str]
    """Setting → its option."""
    switches: Mapping[str, tuple[str, str]]
    """Setting that is true or false → the options for both; empty where there is none."""
    assigned: Collection[str]
    """Settings that are given by --set."""

    @classmethod
    def of(cls, command: Any) -> "Flags":
        """The options of a command of click."""
        options: dict[str, str] = {}
        switches: dict[str, tuple[str, str]] = {}
        for one in command.params:
            long = next((name for name in one.opts if name.startswith("--")), None)
            if long is None or one.name is None:
                continue
            options[one.name] = long
            if getattr(one, "is_flag", False):
                switches[one.name] = long, next(iter(one.secondary_opts), "")
        if "chat_config" not in options:
            return cls(options, switches, ())

        return cls(options, switches, frozenset(chat_settings()))

    def write(self, name: str, value: str) -> str:
        """A setting with its value; `value` as a run file has it."""
        if name in self.switches and value in ("true", "false"):
            switch = self.switches[name][value == "false"]
            return switch or f"leave out {self.options[name]}"
        if name in self.options:
            return f"{self.options[name]} {value}"
        return (
            f"--set '{name}={value}'" if re.search(r"[^\w.-]", value) else f"--set {name}={value}"
        )

    def name(self, name: str) -> str:
        """A setting without a value."""
        return self.options.get(name) or f"--set {name}=…"


def as_flags(message: str, flags: Flags) -> str:
    """A message with its settings as options."""
    names = {*flags.options, *flags.assigned}
    if not names or _FILE_KEY.match(message):
        return message

    def given(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        if name not in flags.switches and value not in _ARTICLES:
            return flags.write(name, value)
        return f"{'' if name in flags.switches else 'set '}{flags.name(name)} to {value}"

    def assigned(found: re.Match[str]) -> str:
        name, value = found[1], found[2].rstrip(".,;")
        if "_" not in name and value not in _CHOICES and not value.startswith(("{", "[")):
            return found[0]  # a word before a colon, such as the name of a folder
        return flags.write(name, value) + found[2][len(value) :]

    listed = _any_of(names)
    message = re.sub(rf"\bset ({listed}) to ({_WORD})", given, message)
    message = re.sub(
        rf"(?<![\w.\"'-])({listed}): (\{{[^{{}}]*\}}|\[[^\[\]]*\]|…|{_WORD}(?![\w-]*: ))",
        assigned,
        message,
    )
    # "set NAME", "set NAME and NAME" and "NAME must be …" name settings, whatever their words.
    message = re.sub(
        rf"\bset ({listed})(?: and ({listed}))?(?=[,;)]|$)",
        lambda found: "set " + " and ".join(flags.name(name) for name in found.groups() if name),
        message,
    )
    message = re.sub(rf"^({listed})(?= must be )", lambda found: flags.name(found[1]), message)
    # A name with an underscore is that of a setting at the beginning, and where the reader is asked
    # to do something.
    plain = _any_of(name for name in names if "_" in name)
    return re.sub(
        rf"(^|\b(?:{_ASKED}) )({plain})(?![\w:=.(\"'])",
        lambda found: found[1] + flags.name(found[2]),
        message,
    )


def _any_of(names: Iterable[str]) -> str:
    """A pattern for any of some names; without any, one that matches nothing."""
    return "|".join(sorted(map(re.escape, names), key=len, reverse=True)) or "(?!)"
