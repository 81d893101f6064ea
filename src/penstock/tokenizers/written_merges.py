"""The vocabulary and merges of a large `tokenizer.json`, left as the text of the file.

As Python objects, Gemma 3's half million merges take 130 MB, or a random access to memory for each
of a million strings if they share these with the vocabulary. Nothing needs them all at once: they
are hashed and written for gigatoken, which kernels do from the text, and handed to the tokenizers
package, which reads them a thousand or two at a time.
"""

import io
import json
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any, Self, final, overload

import numpy as np

from penstock.core.arrays import Bool, Int64, UInt32
from penstock.core.json_values import JsonObject
from penstock.core.large_json import parse_large_json
from penstock.core.system import without_collector
from penstock.tokenizers import _written_kernels
from penstock.tokenizers.written_vocabulary import WrittenVocabulary

LARGE = 4_000_000
"""Bytes of a file from which on it is read this way; the objects of smaller ones are small."""

# The layout that the tokenizers package writes. A line break inside a JSON string is escaped, so
# none of these can be part of a string.
_VOCABULARY = b'\n    "vocab": {'
_VOCABULARY_END = b"\n    }"
_NAME = b'\n    "merges": ['
_FIRST = b"\n      [\n"
_CLOSING = b"\n      ]"
_END = b"\n    ]"

_STAND_IN = "cut out"
_PART = 1 << 16
"""Bytes that are read at once."""

Pair = tuple[str, str]


@final
class WrittenMerges(Sequence[Pair]):
    """Pairs of tokens; each pass reads their text."""

    def __init__(self, content: bytes, begins: UInt32, left_out: Int64) -> None:
        """Use `read`.

        Args:
            content: The file.
            begins: Where each merge begins, and the last ends.
            left_out: Numbers of merges to leave out, in order.
        """
        self._content, self._begins, self._left_out = content, begins, left_out

    @classmethod
    def read(cls, content: bytes, begin: int, end: int) -> Self | None:
        """Merges between the brackets of a list; None: something about them is unusual."""
        begins, _ = _begins_and_hashes(content, begin, end)
        return None if begins is None else cls(content, begins, np.empty(0, np.int64))

    def without(self, texts: Collection[str]) -> Self:
        """Those that make none of these texts."""
        encoded = [text.encode(errors="surrogatepass") for text in texts]
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        unwanted = np.empty(len(encoded), np.uint32)
        _written_kernels.hash_texts(np.frombuffer(b"".join(encoded), np.uint8), offsets, unwanted)
        begin, end = int(self._begins[0]), int(self._begins[-1])
        _, hashes = _begins_and_hashes(self._content, begin, end)
        table = np.zeros(1 << 20, np.bool_)
        table[unwanted % len(table)] = True
        maybe = np.flatnonzero(table[hashes % len(table)])
        maybe = maybe[np.isin(hashes[maybe], unwanted)]
        wanted = frozenset(texts)
        made = [number for number in maybe.tolist() if "".join(self._at(number)) in wanted]
        left_out = np.union1d(self._left_out, np.array(made, np.int64))
        return type(self)(self._content, self._begins, left_out)

    def of_windows(self, table: Bool) -> list[Pair]:
        """Those that make a token which the text marked in `table` may have."""
        chosen = np.empty(len(self._begins) - 1, np.bool_)
        data, scratch = np.frombuffer(self._content, np.uint8), np.empty(self._longest, np.uint8)
        _written_kernels.choose_merges(data, self._begins, scratch, table, chosen)
        chosen[self._left_out] = False
        return [self._at(number) for number in np.flatnonzero(chosen).tolist()]

    def compact(self) -> Iterator[bytes]:
        """They as JSON without spaces."""
        return self._written(ascii_only=False)

    def canonical_json(self) -> Iterator[bytes]:
        """They as `canonical_json` writes a list of them."""
        return self._written(ascii_only=True)

    def parts(self) -> Iterator[list[Pair]]:
        """The merges, a thousand or two at a time."""
        for first, last in self._runs():
            read = json.loads(b"[%b]" % self._text(first, last))
            yield [(left, right) for left, right in read]

    def __iter__(self) -> Iterator[Pair]:
        return chain.from_iterable(self.parts())

    def __len__(self) -> int:
        return len(self._begins) - 1 - len(self._left_out)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        if isinstance(index, slice):
            return list(self)[index]
        number = range(len(self))[index]
        for left_out in self._left_out.tolist():
            number += number >= left_out
        return self._at(number)

    @property
    def _longest(self) -> int:
        return int(np.diff(self._begins).max(initial=0))

    def _at(self, number: int) -> Pair:
        left, right = json.loads(self._text(number, number + 1))
        return left, right

    def _text(self, first: int, last: int) -> bytes:
        """The text of consecutive merges."""
        text = self._content[int(self._begins[first]) : int(self._begins[last])]
        return text.rstrip(b" \n\r\t,")

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Numbers of consecutive merges, whose text is about as long as a part."""
        ends = [*self._left_out.tolist(), len(self._begins) - 1]
        first = 0
        for end in ends:
            while first < end:
                last = int(np.searchsorted(self._begins, int(self._begins[first]) + _PART))
                last = min(max(last, first + 1), end)
                yield first, last
                first = last
            first = end + 1

    def _written(self, *, ascii_only: bool) -> Iterator[bytes]:
        opening = b"["
        for first, last in self._runs():
            data = np.frombuffer(self._text(first, last), np.uint8)
            out = np.empty(6 * len(data), np.uint8)
            size = _written_kernels.compact(data, 0, len(data), ascii_only, out)
            yield opening + out[:size].tobytes()
            opening = b","
        yield b"]" if opening == b"," else b"[]"


def _begins_and_hashes(content: bytes, begin: int, end: int) -> tuple[UInt32 | None, UInt32]:
    """Where each merge begins and the last ends, and hashes of the tokens that they make; None:
    something about them is unusual.
    """
    most = content.count(b"[", begin, end)
    begins, hashes = np.empty(most + 1, np.uint32), np.empty(most, np.uint32)
    data, scratch = np.frombuffer(content, np.uint8), np.empty(end - begin, np.uint8)
    count = _written_kernels.read_merges(data, begin, end, scratch, begins, hashes)
    return (None if count < 0 else begins[: count + 1]), hashes[: max(count, 0)]


@without_collector()
def parse_tokenizer_json(content: bytes, *, large: int | None = None) -> Any:
    """As `json.loads`; the vocabulary and merges of a large file become `WrittenVocabulary` and
    `WrittenMerges`.

    Args:
        content: The file.
        large: Bytes from which on it is large; None: `LARGE`.

    Raises:
        ValueError: It is not JSON.
    """
    least = LARGE if large is None else large
    parsed = _parse_apart(content) if least <= len(content) < 1 << 32 else None
    return parse_large_json(content) if parsed is None else parsed


def _parse_apart(content: bytes) -> JsonObject | None:
    """The file without vocabulary and merges, then these; None: it is laid out in another way."""
    first = content.find(_VOCABULARY)
    first_end = content.find(_VOCABULARY_END, first)
    second = content.find(_NAME + _FIRST, first_end)
    second_end = content.find(_CLOSING + _END, second) + len(_CLOSING)
    if min(first, first_end, second) < 0 or second_end < len(_CLOSING):
        return None
    before, between = content[:first], content[first_end + len(_VOCABULARY_END) : second]
    rest = b'%b\n    "vocab": "%b"%b\n    "merges": "%b"%b' % (
        *(before, _STAND_IN.encode(), between, _STAND_IN.encode()),
        content[second_end + len(_END) :],
    )
    try:
        parsed: JsonObject = parse_large_json(rest)
        # The stand-ins tell whether they are the model's.
        model = parsed["model"]
        if model["merges"] != _STAND_IN or model["vocab"] != _STAND_IN:
            return None
    except (KeyError, TypeError, ValueError):
        return None
    merges = WrittenMerges.read(content, second + len(_NAME), second_end)
    vocabulary = WrittenVocabulary.read(content, first + len(_VOCABULARY), first_end)
    if merges is None or vocabulary is None:
        return None
    model["merges"], model["vocab"] = merges, vocabulary
    return parsed


@without_collector()
def dump_tokenizer_json(content: JsonObject) -> bytes:
    """`json.dumps` without spaces, of a file that may hold `WrittenVocabulary` and `WrittenMerges`.

    Their text stays UTF-8, and the other one's is ASCII.
    """
    model = dict(content["model"])
    written = {
        name: model[name]
        for name in ("vocab", "merges")
        if isinstance(model.get(name), WrittenVocabulary | WrittenMerges)
    }
    model.update(dict.fromkeys(written, _STAND_IN))
    text = json.dumps({**content, "model": model}, separators=(",", ":")).encode()
    # A quote inside a JSON string is escaped, so this is no part of one.
    named = {name: f'"{name}":"{_STAND_IN}"'.encode() for name in written}
    out, done = io.BytesIO(), 0
    for name in sorted(written, key=lambda name: text.rfind(named[name])):
        place = text.rfind(named[name])
        out.write(text[done : place + len(name) + 3])
        out.writelines(written[name].compact())
        done = place + len(named[name])
    out.write(text[done:])
    return out.getvalue()  # not a copy
