"""The merges of a large `tokenizer.json`, left as the text of the file.

As Python objects, Gemma 3's half million merges take 130 MB, or a random access to memory for each
of a million strings if they share these with the vocabulary. Nothing needs them all at once: they
are hashed, written for gigatoken, and handed to the tokenizers package. So each of these reads them
again, a thousand or two at a time, which stay in the processor's cache.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Self, final, overload

from penstock.core.json_values import JsonObject
from penstock.core.large_json import parse_large_json
from penstock.core.system import without_collector

# The layout that the tokenizers package writes. A line break inside a JSON string is escaped, so
# none of these can be part of a string.
_NAME = b'\n    "merges": ['
_FIRST = b"\n      [\n"
_CLOSING = b"\n      ]"
_BETWEEN = _CLOSING + b",\n      ["
_END = b"\n    ]"

_STAND_IN = "merges, cut out"
_PART = 1 << 16
"""Bytes that are read at once."""

Pair = tuple[str, str]


@final
class WrittenMerges(Sequence[Pair]):
    """Pairs of tokens; each pass parses their text."""

    def __init__(
        self, content: bytes, begin: int, end: int, left_out: Collection[str] = frozenset()
    ) -> None:
        """Merges between two places of a file, without those that make a text in `left_out`."""
        self._content, self._begin, self._end = content, begin, end
        self._left_out = left_out
        self._count: int | None = None

    def without(self, texts: Collection[str]) -> Self:
        """Those that make none of these texts."""
        left_out = frozenset(texts).union(self._left_out)
        return type(self)(self._content, self._begin, self._end, left_out)

    def parts(self) -> Iterator[list[Pair]]:
        """The merges, a thousand or two at a time.

        Raises:
            ValueError, TypeError: They are not JSON, or not pairs.
        """
        begin, count = self._begin, 0
        while begin < self._end:
            cut = self._content.find(_BETWEEN, begin + _PART, self._end)
            end = self._end if cut < 0 else cut + len(_CLOSING)
            read = json.loads(b"[%b]" % self._content[begin:end])
            pairs: list[Pair] = [(left, right) for left, right in read]
            if self._left_out:
                pairs = [pair for pair in pairs if "".join(pair) not in self._left_out]
            yield pairs
            begin, count = end + 1, count + len(pairs)
        self._count = count

    def __iter__(self) -> Iterator[Pair]:
        return chain.from_iterable(self.parts())

    def __bool__(self) -> bool:
        return any(map(len, self.parts()))

    def __len__(self) -> int:
        return sum(map(len, self.parts())) if self._count is None else self._count

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        if isinstance(index, slice):
            return list(self)[index]
        return next(islice(self, range(len(self))[index], None))


@without_collector()
def parse_tokenizer_json(content: bytes) -> Any:
    """As `json.loads`; merges that are written as pairs become `WrittenMerges`.

    Raises:
        ValueError: It is not JSON.
    """
    parsed = _parse_apart(content)
    return parse_large_json(content) if parsed is None else parsed


def _parse_apart(content: bytes) -> JsonObject | None:
    """The file without its merges, then the merges; None: it is laid out in another way."""
    name = content.find(_NAME + _FIRST)
    end = content.find(_CLOSING + _END, name) + len(_CLOSING)
    if name < 0 or end < len(_CLOSING):
        return None
    stand_in = f'\n    "merges": "{_STAND_IN}"'.encode()
    try:
        parsed: JsonObject = parse_large_json(
            content[:name] + stand_in + content[end + len(_END) :]
        )
        # The stand-in tells whether they are the model's.
        if parsed["model"]["merges"] != _STAND_IN:
            return None
        merges = WrittenMerges(content, name + len(_NAME), end)
        len(merges)  # reads them all
    except (KeyError, TypeError, ValueError):
        return None
    parsed["model"]["merges"] = merges
    return parsed


@without_collector()
def dump_tokenizer_json(content: JsonObject) -> str:
    """`json.dumps` without spaces, of a file that may hold `WrittenMerges`, part by part."""
    merges = content["model"].get("merges")
    if not isinstance(merges, WrittenMerges):
        return json.dumps(content, separators=(",", ":"))
    model = {**content["model"], "merges": _STAND_IN}
    # A quote inside a JSON string is escaped, so this is no part of one.
    name, text = '"merges":', json.dumps({**content, "model": model}, separators=(",", ":"))
    before, _, after = text.rpartition(f'{name}"{_STAND_IN}"')
    parts = (json.dumps(part, separators=(",", ":"))[1:-1] for part in merges.parts() if part)
    return f"{before}{name}[{','.join(parts)}]{after}"
