r"""Role boundaries: how turns begin and end, declared as text or token ids, and resolved to ids.

```python
chatml = [
    ps.chat.Boundary("user", "<|im_start|>user\n", "<|im_end|>"),
    ps.chat.Boundary("assistant", "<|im_start|>assistant\n", "<|im_end|>"),
]
weights = ps.chat.scan(token_ids, ps.chat.resolve(chatml, tokenizer))
```

`scanning` explains how they are used. A marker that no row can contain (it encodes to nothing, or
`eos_token` without such a token) is an error, also in the families that come with penstock.
Resolved boundaries are logged once.

**Markers as ids.** A marker of control tokens always has the same ids. A marker of ordinary text
does not, and a missed marker would silently mask a whole turn. So all forms of a marker are found
in advance:

- *Text before it.* Plain `[/INST]` has different tokens after a letter than after a space
  (SentencePiece), and `<` others at the beginning. The marker is encoded after several contexts. A
  form counts if its first token contains no more of the context than whitespace.
- *Text after it.* The newline at the end of `<|im_start|>assistant\n` merges with newlines at the
  beginning of the content into one token `\n\n`. So the last token may be any that begins with that
  newline. Such a token belongs to the marker: the model is prompted with the marker's own ids and
  must never write a part of them.

Costs a few short encodings and one pass over the vocabulary's bytes (milliseconds), once per
tokenizer.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, SupportsIndex, final

import numpy as np

from penstock.chat.tokens.encoding import encode_rendered
from penstock.core.errors import ConfigError, TokenizerError
from penstock.core.json_values import JsonMapping
from penstock.tokenizers import ByteTable, Tokenizer
from penstock.tokenizers.loading import load_tokenizer

EOS = "eos_token"
"""Name of the tokenizer's own end of text, as an end."""
MarkerText = str | Sequence[int]
"""Text, or token ids."""
_CONTEXTS = ("x", "x ", "x\n", "x\n\n", ".")
_log = logging.getLogger("penstock.chat")
_logged: set[tuple["ResolvedBoundary", ...]] = set()


class OtherTokenizer(Protocol):
    """What is used of a tokenizer of another library, such as transformers."""

    eos_token_id: int | None
    unk_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Ids of a text; text of control tokens becomes these."""

    def get_vocab(self) -> Mapping[str, int]:
        """Ids by the text of their tokens."""


AnyTokenizer = Tokenizer | OtherTokenizer


@final
@dataclass(frozen=True)
class Boundary:
    """How the turns of one role begin and end. A role may have several boundaries, one for each way
    to begin.
    """

    role: str
    """Name of the role."""
    start: MarkerText
    """Marker that opens the turn: text or token ids."""
    end: MarkerText | Sequence[MarkerText] | None = None
    """Markers that close the turn: text (`"eos_token"`: the tokenizer's own), token ids, or a list
    of these. None: the turn runs to the end of its row.
    """
    include_start: bool = False
    """Whether the start counts in a trained role."""
    include_end: bool = True
    """Whether the end can count (`train_on_eos` decides when). If not, it is not consumed, so it
    may start the next turn.
    """
    end_starts_next: bool = False
    """The end counts as usual and also starts the next turn (GLM-4: `<|user|>`)."""
    until: MarkerText | Sequence[MarkerText] | None = None
    """Markers of other turns that close this one if it has no end; never counted and never
    consumed. Same values as `end`.
    """

    def __post_init__(self) -> None:
        if not self.role or not isinstance(self.role, str):
            raise ConfigError(
                f"boundary {self}: role is {self.role!r}; expected the name of a role"
            )
        for name in ("start", "end", "until"):
            given = getattr(self, name)
            frozen = _frozen(given, several=name != "start")
            if frozen is None or (name == "start" and not frozen):
                raise ConfigError(
                    f"boundary of {self.role!r}: {name} is {given!r}; expected text or token "
                    "ids that are not empty"
                    + (", or a list of these, or None" if name != "start" else "")
                )
            object.__setattr__(self, name, frozen if frozen else None)
        for name in ("include_start", "include_end", "end_starts_next"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"boundary of {self.role!r}: {name} is {getattr(self, name)!r}; expected "
                    "true or false"
                )

    @classmethod
    def from_mapping(cls, entry: JsonMapping) -> "Boundary":
        """A boundary from an entry of `role_boundaries` in a run file, or of the family data.

        Raises:
            ConfigError: A key is unknown, or role or start is missing.
        """
        known = tuple(cls.__dataclass_fields__)
        unknown = [key for key in entry if key not in known]
        if unknown or not {"role", "start"} <= set(entry):
            raise ConfigError(
                f"role boundary {dict(entry)}: "
                + (
                    f"unknown: {', '.join(map(str, unknown))}"
                    if unknown
                    else "role or start is missing"
                )
                + f"; keys are {', '.join(known)}"
            )
        return cls(**entry)


@final
@dataclass(frozen=True, slots=True)
class Marker:
    """Token ids to find in a row; the last may be one of `tails` (sorted) instead."""

    ids: tuple[int, ...]
    tails: tuple[int, ...] = ()

    def __str__(self) -> str:
        merged = f" (or the last merged: {len(self.tails)} tokens)" if self.tails else ""
        return f"{list(self.ids)}{merged}"


@final
@dataclass(frozen=True, slots=True)
class ResolvedBoundary:
    """A boundary as token ids, with every form of its markers; made by `resolve`."""

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


def resolve(
    boundaries: Iterable[Boundary | ResolvedBoundary],
    tokenizer: AnyTokenizer | str | Path | None = None,
) -> tuple[ResolvedBoundary, ...]:
    """Turn every marker into token ids; logged once to `penstock.chat`.

    Args:
        boundaries: In any order: the longest start wins in the scan. Resolved ones are kept as they
            are.
        tokenizer: A penstock tokenizer, or where to load one from. Any other with `encode(text,
            add_special_tokens=False)` and `eos_token_id` works, but does not find forms of a marker
            that merge with the text around it. Not needed if all markers are ids.

    Raises:
        ConfigError: A marker encodes to nothing, `eos_token` is used but the tokenizer has none, a
            marker is text but there is no tokenizer, or two roles begin with the same tokens.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer)
    given = tuple(boundaries)
    resolved = tuple(
        boundary if isinstance(boundary, ResolvedBoundary) else _resolve_one(boundary, tokenizer)
        for boundary in given
    )
    if resolved != given:
        check_starts(resolved)
        if resolved not in _logged:
            _logged.add(resolved)
            for boundary in resolved:
                _log.info("role boundary %s", boundary)
    return resolved


def check_starts(resolved: Sequence[ResolvedBoundary]) -> None:
    """Raise ConfigError if two roles begin with the same tokens."""
    owner: dict[tuple[int, ...], str] = {}
    for boundary in resolved:
        for marker in boundary.starts:
            role = owner.setdefault(marker.ids, boundary.role)
            if role != boundary.role:
                raise ConfigError(
                    f"boundaries of {role!r} and {boundary.role!r} both start with the ids "
                    f"{list(marker.ids)}, so the role of a turn is unknown; make the starts "
                    "longer until they differ"
                )


def _resolve_one(boundary: Boundary, tokenizer: AnyTokenizer | None) -> ResolvedBoundary:
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


def _all_to_ids(markers: Any, where: str, tokenizer: AnyTokenizer | None) -> tuple[Marker, ...]:
    found = [
        marker
        for given in markers or ()
        for marker in _to_ids(given, where, tokenizer, encode_marker)
    ]
    return tuple(dict.fromkeys(found))


def _to_ids(
    given: MarkerText,
    where: str,
    tokenizer: AnyTokenizer | None,
    encode: Callable[[str, AnyTokenizer], list[Marker]],
) -> tuple[Marker, ...]:
    if not isinstance(given, str):
        return (Marker(tuple(given)),)
    if tokenizer is None:
        raise ConfigError(
            f"{where}: {given!r} is text, but there is no tokenizer to encode it; give "
            "tokenizer=, or ids"
        )
    if given == EOS:
        eos = eos_id_of(tokenizer)
        if eos is None:
            raise ConfigError(
                f"{where}: the tokenizer has no end-of-text token; give the end of the turn as text"
            )
        return (Marker((eos,)),)
    forms = encode(given, tokenizer)
    if not forms:
        raise ConfigError(
            f"{where}: {given!r} encodes to no token, so no row can hold it; give another "
            "marker, or its ids"
            + (", or None for turns to the end of the row" if ", end" in where else "")
        )
    return tuple(forms)


def eos_id_of(tokenizer: AnyTokenizer) -> int | None:
    """Id of a tokenizer's end of text; None if it has none."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.eos_id
    eos = getattr(tokenizer, "eos_token_id", None)
    return None if eos is None else int(eos)


def _frozen(given: Any, *, several: bool) -> object:
    """One or several markers as tuples; (): nothing was given; None: `given` is no marker."""
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


def _is_id(value: object) -> bool:
    return (
        isinstance(value, SupportsIndex) and not isinstance(value, bool) and value.__index__() >= 0
    )


def encode_marker(text: str, tokenizer: AnyTokenizer) -> list[Marker]:
    """Every form of `text` as tokens, whatever comes before it; empty if it encodes to nothing.

    Args:
        text: The marker as the template writes it.
        tokenizer: A penstock tokenizer; any other with `encode(text, add_special_tokens=False)`
            gives only one form.
    """
    if not isinstance(tokenizer, Tokenizer):
        ids = tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))
        return [Marker(ids)] if ids else []
    ids = _encode(text, tokenizer)
    if not ids:
        return []
    table = _byte_table(tokenizer)
    forms = {ids: Marker(ids)}
    if table is not None and not table.is_control[ids[0]]:
        names = {token_id: name.encode() for name, token_id in tokenizer.special_tokens.items()}
        for context in _CONTEXTS:
            form = _form_behind(context, text, tokenizer, table, names)
            if form:
                forms.setdefault(form, Marker(form))
    return list(forms.values())


def encode_start(text: str, tokenizer: AnyTokenizer) -> list[Marker]:
    """`encode_marker` for a marker before content; adds the forms in which its last token merges
    with the content.
    """
    forms = encode_marker(text, tokenizer)
    space = text[len(text.rstrip()) :]
    if not space or not forms or not isinstance(tokenizer, Tokenizer):
        return forms
    table = _byte_table(tokenizer)
    if table is None:
        return forms
    head = _encode(text.rstrip(), tokenizer)
    merged = []
    for form in forms:
        last = form.ids[-1]
        if head and form.ids[: len(head)] == head and len(form.ids) > len(head):
            begun = form.ids[: len(head) + 1]
            merged.append(Marker(begun, _beginning_with(space[:1].encode(), table)))
        elif not table.is_control[last]:
            merged.append(Marker(form.ids, _beginning_with(table[last], table)))
    covered = {form.ids for form in merged}
    return merged + [form for form in forms if form.ids not in covered]


def _encode(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    try:
        # The same ids as below, without loading the vocabulary's own encoder (half a second for
        # 150,000 entries).
        return tuple(encode_rendered(tokenizer, text, np.ones(len(text), np.bool_)).ids.tolist())
    except TokenizerError:
        return tuple(tokenizer.encode(text, allow_control=True).tolist())


def _byte_table(tokenizer: Tokenizer) -> ByteTable | None:
    try:
        return tokenizer.byte_table
    except TokenizerError:
        # A lossy normaliser: nothing is known of its tokens, except those of the encoded marker.
        return None


def _form_behind(
    context: str, text: str, tokenizer: Tokenizer, table: ByteTable, names: dict[int, bytes]
) -> tuple[int, ...] | None:
    """The ids of `text` after `context`; None if its first token contains more of the context than
    whitespace.
    """
    ids = _encode(context + text, tokenizer)
    pieces = [names.get(token) or table[token] for token in ids]
    whole, spelled = (context + text).encode(), b"".join(pieces)
    # SentencePiece puts a space before the text.
    position = -1 if spelled == b" " + whole else 0
    if spelled[-position:] != whole:
        return None
    for number, piece in enumerate(pieces):
        if position + len(piece) > len(context):
            shared = context.encode()[max(position, 0) : len(context)]
            return ids[number:] if not shared.strip() else None
        position += len(piece)
    return None


def _beginning_with(beginning: bytes, table: ByteTable) -> tuple[int, ...]:
    """All ids with bytes that begin with `beginning`, ascending."""
    matches = (table.lengths >= len(beginning)) & ~table.is_control
    for place, byte in enumerate(beginning):
        at = np.minimum(table.offsets[:-1] + place, len(table.data) - 1)
        matches &= table.data[at] == byte
    return tuple(np.flatnonzero(matches).tolist())
