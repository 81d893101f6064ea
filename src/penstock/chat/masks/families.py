"""Families of chat templates, as data: role boundaries, media tokens and stop tokens of models by
name.

They are in `families.yaml`, next to this file. A family lists the control tokens of its tokenizers;
a tokenizer that lacks one is refused, because the markers would become plain text that no row
contains. A family describes only the markers of a template, not how it renders.

Keys of an entry: `title`; `kind` (text or multimodal); `boundaries` (as `Boundary`); `control`
(tokens that every tokenizer of the family has); `optional` (tokens that some of them have; if one
is missing, its markers are left out, which is logged); `media` (tokens for images, audio or video);
`stop` (tokens that end a generation); `signs` and `unlike` (texts that a template's source contains
and does not contain); `notes`.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any, final
from weakref import WeakKeyDictionary

import yaml

from penstock.chat.masks.boundaries import (
    EOS,
    AnyTokenizer,
    Boundary,
    ResolvedBoundary,
    eos_id_of,
    resolve,
)
from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.tokenizers import Tokenizer

_log = logging.getLogger("penstock.chat")
_resolved: "WeakKeyDictionary[Tokenizer, dict[Family, tuple[ResolvedBoundary, ...]]]" = (
    WeakKeyDictionary()
)
"""Boundaries of families as ids of tokenizers, which take some milliseconds to find."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of templates; the module describes the fields."""

    name: str
    title: str
    kind: str
    boundaries: tuple[Boundary, ...]
    control: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    media: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    notes: str = ""

    def resolve(self, tokenizer: AnyTokenizer) -> tuple[ResolvedBoundary, ...]:
        """The boundaries as ids of `tokenizer`.

        Raises:
            ConfigError: The tokenizer lacks a control token of the family.
        """
        known = _resolved.setdefault(tokenizer, {}) if isinstance(tokenizer, Tokenizer) else {}
        if self not in known:
            known[self] = self._resolve(tokenizer)
        return known[self]

    def _resolve(self, tokenizer: AnyTokenizer) -> tuple[ResolvedBoundary, ...]:
        """Uncached `resolve`."""
        missing = [text for text in self.control if token_id(text, tokenizer) is None]
        if missing:
            raise ConfigError(
                f"family {self.name!r}: the tokenizer has no control token "
                f"{', '.join(missing)}, so it is not of this family ({self.title}); choose "
                "another family, or declare role boundaries"
            )
        absent = frozenset(text for text in self.optional if token_id(text, tokenizer) is None)
        if absent:
            texts = ", ".join(sorted(absent))
            _log.info(
                "family %s: this tokenizer has no %s; markers with these are left out",
                self.name,
                texts,
            )
        return resolve(_without(self.boundaries, absent), tokenizer)

    def media_ids(self, tokenizer: AnyTokenizer) -> tuple[int, ...]:
        """Ids of the media tokens that `tokenizer` has, ascending."""
        return _known_ids(self.media, tokenizer)

    def stop_ids(self, tokenizer: AnyTokenizer) -> tuple[int, ...]:
        """Ids that end a generation, ascending."""
        return _known_ids(self.stop, tokenizer)


def families() -> tuple[str, ...]:
    """Names of all families."""
    return tuple(_read())


def family(name: str) -> Family:
    """The family of that name.

    Raises:
        ConfigError: There is none.
    """
    if name not in _read():
        raise ConfigError(f"no family {name!r}; there are {', '.join(families())}")
    return _read()[name]


def detect_family(template_source: str) -> Family | None:
    """The family with markers in a Jinja template; None if none is recognised.

    Best effort: a template that builds its markers from pieces is not recognised, and one that
    mixes two families counts as the first. The result is for cross-checks; no mask relies on it
    alone.
    """
    source = template_source.replace("\\n", "\n")
    for candidate in _read().values():
        found = all(sign in source for sign in candidate.signs)
        if found and not any(sign in source for sign in candidate.unlike):
            return candidate
    return None


def token_id(text: str, tokenizer: AnyTokenizer) -> int | None:
    """Id of a control token, or None; never the unknown token, which represents real text."""
    if text == EOS:
        return eos_id_of(tokenizer)
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.special_tokens.get(text)
    found = tokenizer.get_vocab().get(text)
    return (
        None if found is None or found == getattr(tokenizer, "unk_token_id", None) else int(found)
    )


def _known_ids(texts: Iterable[str], tokenizer: AnyTokenizer) -> tuple[int, ...]:
    return tuple(
        sorted({found for text in texts if (found := token_id(text, tokenizer)) is not None})
    )


def _without(boundaries: Iterable[Boundary], absent: frozenset[str]) -> tuple[Boundary, ...]:
    """The boundaries without the markers that contain a token in `absent`."""

    def possible(marker: Any) -> bool:
        return not any(text in marker for text in absent)

    def others(markers: Any) -> list[Any]:
        return [marker for marker in markers or () if possible(marker)]

    kept = [boundary for boundary in boundaries if possible(boundary.start)]
    return tuple(
        replace(boundary, end=others(boundary.end), until=others(boundary.until))
        for boundary in kept
    )


@lru_cache(maxsize=1)
def _read() -> dict[str, Family]:
    """All families, in the file's order."""
    entries = yaml.safe_load(
        files("penstock.chat.masks").joinpath("families.yaml").read_text(encoding="utf-8")
    )["families"]
    return {name: _family(name, dict(entry)) for name, entry in entries.items()}


def _family(name: str, entry: JsonObject) -> Family:
    boundaries = tuple(Boundary.from_mapping(boundary) for boundary in entry.pop("boundaries"))
    fields: JsonObject = {
        key: tuple(value) if isinstance(value, list) else value.strip()
        for key, value in entry.items()
    }
    return Family(name=name, boundaries=boundaries, **fields)
