"""Role boundaries: how turns begin and end, declared as text or token ids, and resolved to ids.

```python
chatml = [
    ps.chat.Boundary("user", "<|im_start|>user\\n", "<|im_end|>"),
    ps.chat.Boundary("assistant", "<|im_start|>assistant\\n", "<|im_end|>"),
]
weights = ps.chat.scan(token_ids, ps.chat.resolve(chatml, tokenizer))
```

`scanning` says what is made of them. Guarantees: a marker that no row could hold (it encodes to nothing, `eos_token`
without such a token) is an error, for the families that come with penstock too; what was resolved is logged once.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from penstock.chat.markers import Marker, encode_marker, encode_start
from penstock.errors import ConfigError
from penstock.tokenizers import load_tokenizer

EOS = "eos_token"
"""As an end: the tokenizer's own end of text."""

MarkerText = str | Sequence[int]
"""Text, or the token ids themselves."""

_log = logging.getLogger("penstock.chat")
_logged: set[tuple["ResolvedBoundary", ...]] = set()


@final
@dataclass(frozen=True)
class Boundary:
    """How the turns of one role begin and end. A role may have several: each way that its turns begin."""

    role: str
    """Name of the role."""
    start: MarkerText
    """Marker that opens the turn: text, or token ids."""
    end: MarkerText | Sequence[MarkerText] | None = None
    """Markers that the turn ends with, any of which closes it: text (`"eos_token"`: the tokenizer's own), token ids, or
    a list of these. None: the turn runs to the end of its row."""
    include_start: bool = False
    """Whether the start counts in a trained role."""
    include_end: bool = True
    """Whether the end may count at all (`train_on_eos` says when). Without it the end is not consumed: it may be the
    start of the next turn."""
    end_starts_next: bool = False
    """The end counts as usual, and yet it is the start of the next turn (GLM-4: `<|user|>`)."""
    until: MarkerText | Sequence[MarkerText] | None = None
    """Markers of other turns that close this one where no end was written; they never count, and are not consumed. A
    list, text or token ids, as `end`."""

    def __post_init__(self) -> None:
        if not self.role or not _is_text(self.role):
            raise ConfigError(f"boundary {self}: role is {self.role!r}; due: the name of a role")
        for name in ("start", "end", "until"):
            given = getattr(self, name)
            frozen = _frozen(given, several=name != "start")
            if frozen is None or (name == "start" and not frozen):
                raise ConfigError(
                    f"boundary of {self.role!r}: {name} is {given!r}; due: text or token ids that are not empty"
                    + (", or a list of these, or None" if name != "start" else "")
                )
            object.__setattr__(self, name, frozen if frozen else None)
        for name in ("include_start", "include_end", "end_starts_next"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"boundary of {self.role!r}: {name} is {getattr(self, name)!r}; due: true or false")

    @classmethod
    def from_mapping(cls, entry: Mapping[str, Any]) -> "Boundary":
        """A boundary from an entry of a run file's `role_boundaries` or of the family data.

        Raises:
            ConfigError: A key is unknown, or role or start is missing.
        """
        known = tuple(cls.__dataclass_fields__)
        unknown = [key for key in entry if key not in known]
        if unknown or not {"role", "start"} <= set(entry):
            raise ConfigError(
                f"role boundary {dict(entry)}: "
                + (f"unknown: {', '.join(map(str, unknown))}" if unknown else "role and start are both due")
                + f"; keys are {', '.join(known)}"
            )
        return cls(**entry)


@final
@dataclass(frozen=True, slots=True)
class ResolvedBoundary:
    """A boundary as token ids: what `resolve` makes of it; every form that a marker can take is listed."""

    role: str
    starts: tuple[Marker, ...]
    ends: tuple[Marker, ...]
    until: tuple[Marker, ...]
    include_start: bool
    include_end: bool
    end_starts_next: bool

    def __str__(self) -> str:
        parts = [f"{self.role}: {' | '.join(map(str, self.starts))} … "]
        parts.append(" | ".join(map(str, self.ends)) or "end of row")
        parts += [f" until {' | '.join(map(str, self.until))}"] if self.until else []
        flags = [name for name in ("include_start", "end_starts_next") if getattr(self, name)]
        flags += [] if self.include_end else ["end not included"]
        return "".join(parts) + (f" ({', '.join(flags)})" if flags else "")


def resolve(boundaries: Iterable[Boundary | ResolvedBoundary], tokenizer: Any = None) -> tuple[ResolvedBoundary, ...]:
    """Turn every marker into token ids; logged once to `penstock.chat`.

    Args:
        boundaries: In any order: the longest start wins in the scan. Resolved ones are kept as they are.
        tokenizer: A penstock tokenizer, or where to load one from. Others that have `encode(text,
            add_special_tokens=False)` and `eos_token_id` serve, but forms of a marker that merge with what is around
            are not found through them. May be left out where all markers are ids.

    Raises:
        ConfigError: A marker encodes to nothing, `eos_token` is asked for and there is none, text is given and no
            tokenizer, or two roles begin with the same tokens.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer)
    given = tuple(boundaries)
    resolved = tuple(
        boundary if isinstance(boundary, ResolvedBoundary) else _resolve_one(boundary, tokenizer) for boundary in given
    )
    if resolved != given:
        check_starts(resolved)
        if resolved not in _logged:
            _logged.add(resolved)
            for boundary in resolved:
                _log.info("role boundary %s", boundary)
    return resolved


def check_starts(resolved: Sequence[ResolvedBoundary]) -> None:
    """Refuse two roles that begin with the same tokens; ConfigError names them."""
    owner: dict[tuple[int, ...], str] = {}
    for boundary in resolved:
        for marker in boundary.starts:
            role = owner.setdefault(marker.ids, boundary.role)
            if role != boundary.role:
                raise ConfigError(
                    f"boundaries of {role!r} and {boundary.role!r} both start with the ids {list(marker.ids)}: which "
                    "turn begins there cannot be told; make the starts longer until they differ"
                )


def _resolve_one(boundary: Boundary, tokenizer: Any) -> ResolvedBoundary:
    where = f"boundary of {boundary.role!r}"
    return ResolvedBoundary(
        boundary.role,
        _to_ids(boundary.start, f"{where}, start", tokenizer, encode_start),
        _all_to_ids(boundary.end, f"{where}, end", tokenizer),
        _all_to_ids(boundary.until, f"{where}, until", tokenizer),
        boundary.include_start,
        boundary.include_end,
        boundary.end_starts_next,
    )


def _all_to_ids(markers: Any, where: str, tokenizer: Any) -> tuple[Marker, ...]:
    found = [marker for given in markers or () for marker in _to_ids(given, where, tokenizer, encode_marker)]
    return tuple(dict.fromkeys(found))


def _to_ids(
    given: MarkerText, where: str, tokenizer: Any, encode: Callable[[str, Any], list[Marker]]
) -> tuple[Marker, ...]:
    if not isinstance(given, str):
        return (Marker(tuple(given)),)
    if tokenizer is None:
        raise ConfigError(
            f"{where}: {given!r} is text, and no tokenizer was given to encode it; give tokenizer=, or ids"
        )
    if given == EOS:
        eos = getattr(tokenizer, "eos_id", None)
        eos = getattr(tokenizer, "eos_token_id", None) if eos is None else eos
        if eos is None:
            raise ConfigError(f"{where}: the tokenizer has no end-of-text token; name the end of the turn itself")
        return (Marker((int(eos),)),)
    forms = encode(given, tokenizer)
    if not forms:
        raise ConfigError(
            f"{where}: {given!r} encodes to no token, so no row can hold it; give another marker, or its ids"
            + ("; None runs to the end of the row" if ", end" in where else "")
        )
    return tuple(forms)


def _frozen(given: Any, *, several: bool) -> Any:
    """A marker, or several, with lists made tuples; () where nothing is given, None where that is no marker."""
    if given is None:
        return ()
    if isinstance(given, str):
        marker: Any = given or None
        return (marker,) if several and marker else marker
    try:
        parts = tuple(given)
    except TypeError:
        return None
    if parts and all(_is_id(part) for part in parts):
        ids = tuple(int(part) for part in parts)
        return (ids,) if several else ids
    if not several or not parts:
        return None if parts or not several else ()
    inner = [_frozen(part, several=False) for part in parts]
    return None if any(not part for part in inner) else tuple(inner)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_id(value: Any) -> bool:
    return not isinstance(value, (str, bool)) and hasattr(value, "__index__") and value.__index__() >= 0
