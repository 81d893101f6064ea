"""Reads another library's configuration key by key, so that no key is left without an answer.

`Keys` hands out values and remembers which were asked for. What became of each key is a `Note`;
those that nobody asked for are found at the end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from textwrap import wrap
from typing import Any, Literal, final

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping
from penstock.core.suggestions import closest
from penstock.core.urls import shown_urls

Fate = Literal["mapped", "differs", "decide", "unsupported", "unknown", "no effect"]
FATES: Mapping[Fate, str] = {
    "unsupported": "Not supported here",
    "unknown": "Unknown keys",
    "decide": "For you to decide",
    "differs": "Translated, with a difference",
    "mapped": "Translated exactly",
    "no effect": "Without effect on the result",
}
"""What became of a key → the heading of its list, in the order of a report."""
LOUD: tuple[Fate, ...] = ("unsupported", "unknown", "decide", "differs")
"""What a user must read."""
OFF: Sequence[Any] = (False, 0, [], {}, "", "no", "none")
"""Values that switch a key off."""


@final
@dataclass(frozen=True, slots=True)
class Note:
    """What became of one key."""

    key: str
    """With its value, if it matters."""
    fate: Fate
    text: str


@final
@dataclass(slots=True)
class Keys:
    """A mapping of which every key must be asked for."""

    values: JsonMapping
    file: str
    notes: list[Note] = field(default_factory=list)
    where: str = ""
    """Place of the mapping in its file, such as `datasets.0.`."""
    seen: set[str] = field(default_factory=set)
    noted: set[str] = field(default_factory=set)
    """Keys of which something was said."""
    asked: list[str] = field(default_factory=list)
    """Keys in the order in which they were asked for, those inside mappings too."""
    library: str = "axolotl"
    names: Mapping[str, str] = field(default_factory=dict)
    """Place of a key here → its name in the file, for files of libraries with other names."""
    defaults: frozenset[str] = frozenset()
    """Places of keys that the file does not give: what the library takes without them."""

    def called(self, name: str) -> str:
        """The name of a key in the file, with its place."""
        place = f"{self.where}{name}"
        return self.names.get(place, place)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key; a null is as good as no value."""
        self.seen.add(name)
        self.asked.append(f"{self.called(name)}: {_short(self.values.get(name))}")
        found = self.values.get(name)
        return default if found is None else found

    def number(self, name: str, default: float | None = None) -> float | None:
        """A number; text that spells one is read too, since YAML takes 2e-4 for a text.

        Raises:
            ConfigError: It is something else.
        """
        found = self.get(name, default)
        try:
            if isinstance(found, bool):
                raise ValueError(found)  # noqa: TRY004 (it is reported below)
            made = None if found is None else float(found)
        except OverflowError:
            made = inf
        except (TypeError, ValueError):
            raise ConfigError(
                f"{self.file}: {self.called(name)} is {found!r}; expected a number"
            ) from None
        if made is not None and not isfinite(made):
            raise ConfigError(
                f"{self.file}: {self.called(name)} is {found!r:.50}; expected a number below "
                "infinity"
            )
        return made

    def whole(self, name: str, default: int | None = None) -> int | None:
        """A whole number.

        Raises:
            ConfigError: It is something else.
        """
        found = self.number(name, default)
        if found is not None and found != int(found):
            raise ConfigError(
                f"{self.file}: {self.called(name)} is {found!r}; expected a whole number"
            )
        return None if found is None else int(found)

    def note(self, name: str, fate: Fate, text: str, *, shown: bool = False) -> None:
        """Say what became of a key; with `shown`, also its value."""
        self.seen.add(name)
        self.noted.add(name)
        if f"{self.where}{name}" in self.defaults and fate not in LOUD:
            return
        value = (
            f": {_short(self.values.get(name))}"
            if shown and self.values.get(name) is not None
            else ""
        )
        if (note := Note(f"{self.called(name)}{value}", fate, text)) not in self.notes:
            self.notes.append(note)

    def mapped(self, name: str, target: str) -> None:
        """Say to which of our keys a key was translated, if it is there."""
        self.seen.add(name)
        if self.values.get(name) is not None:
            self.note(name, "mapped", target)

    def inside(self, values: JsonMapping, where: str) -> "Keys":
        """The keys of a mapping inside this one; notes go to the same list."""
        return Keys(
            values,
            self.file,
            self.notes,
            f"{self.where}{where}.",
            asked=self.asked,
            library=self.library,
            names=self.names,
            defaults=self.defaults,
        )

    def rest(self, no_effect: Mapping[str, str], unsupported: Mapping[str, str]) -> None:
        """Account for the keys of which nothing was said yet."""
        for name, value in self.values.items():
            if name in self.noted:
                continue
            if value is None:
                self.note(name, "no effect", "it is empty")
            elif name in no_effect:
                self.note(name, "no effect", no_effect[name])
            elif (name in unsupported or name in self.seen) and any(value == off for off in OFF):
                self.note(name, "no effect", "it is off, as it always is here")
            elif name in unsupported:
                self.note(name, "unsupported", unsupported[name], shown=True)
            else:
                known = {*no_effect, *unsupported, *self.seen} - {name}
                near = closest(name, known, 0.8)
                self.note(
                    name,
                    "unknown",
                    f"did you mean {near}?"
                    if near
                    else "no key of this name is known; check its spelling, or see its plugin",
                    shown=True,
                )


def refuse_wrong_kind(found: object, kind: type, name: str, file: str, expected: str) -> None:
    """Raise if a value is not of a kind."""
    if not isinstance(found, kind):
        raise ConfigError(f"{file}: {name} is {_short(found)}; expected {expected}")


def report(notes: Sequence[Note], fates: Iterable[Fate]) -> list[str]:
    """Lists of notes under headings; keys with the same text share a line."""
    lines: list[str] = []
    for fate in fates:
        grouped: dict[str, list[str]] = {}
        for note in notes:
            if note.fate == fate:
                grouped.setdefault(note.text, []).append(note.key)
        if grouped:
            lines += [
                "",
                f"{FATES[fate]}:",
                *(f"  {', '.join(keys)} → {text}" for text, keys in grouped.items()),
            ]
    return lines[1:]


def summary(notes: Sequence[Note]) -> str:
    """How many keys had which fate, in one line."""
    words: Mapping[Fate, str] = {
        "mapped": "exact",
        "differs": "with a difference",
        "no effect": "without effect on the result",
        "decide": "for you to decide",
        "unsupported": "not supported",
        "unknown": "unknown",
    }
    counts = [(sum(note.fate == fate for note in notes), word) for fate, word in words.items()]
    return f"{len(notes)} keys: " + ", ".join(f"{count} {word}" for count, word in counts if count)


def wrapped(line: str, width: int) -> list[str]:
    """A line of a report in lines of at most `width`; others, such as commands, as they are."""
    if " → " not in line:
        return [line]
    return wrap(
        line, width, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )


def _short(value: object) -> str:
    text = " ".join(shown_urls(str(value)).split())
    return text if len(text) <= 50 else f"{text[:49]}…"
