"""The vocabulary of a large `tokenizer.json` in a few flat arrays.

As a dict of strings, Gemma 3's 262,144 tokens take 40 MB, and each pass over them in another order
than that of memory is slow. Most of a run never looks at one: tokens are hashed, written for
gigatoken, and a few are looked up.
"""

from collections.abc import Collection, ItemsView, Iterator, Mapping, ValuesView
from itertools import pairwise
from typing import Self, final

import numpy as np

from penstock.core.arrays import Array, Bool, Bytes, Int32
from penstock.tokenizers import _written_kernels

_PART = 10_000
"""Entries that become Python objects, or text, at once."""


@final
class WrittenVocabulary(Mapping[str, int]):
    """Token → id, in the order of the file; bytes of tokens, their ends and ids are arrays."""

    def __init__(self, content: bytes, begin: int, end: int, read: tuple[Array, ...]) -> None:
        """Use `read`, which gives the arrays; the text of the file serves `compact`."""
        self._content, self._begin, self._end = content, begin, end
        self._texts, self._offsets, self._ids, self._order = read

    @classmethod
    def read(cls, content: bytes, begin: int, end: int) -> Self | None:
        """The entries between the braces of a vocabulary; None: something about them is unusual."""
        most = content.count(b'":', begin, end)
        texts, ids = np.empty(end - begin, np.uint8), np.empty(most, np.int32)
        offsets = np.empty(most + 1, np.int32)
        data = np.frombuffer(content, np.uint8)
        count = _written_kernels.read_vocabulary(data, begin, end, texts, offsets, ids)
        if count < 0:
            return None
        texts, offsets, ids = texts[: offsets[count]].copy(), offsets[: count + 1], ids[:count]
        order = np.empty(count, np.int32)
        if _written_kernels.sort_texts(texts, offsets, order, np.empty_like(order)):
            return None  # the last of two equal entries counts
        return cls(content, begin, end, (texts, offsets, ids, order))

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _PART):
            edges = self._offsets[first : first + _PART + 1].tolist()
            part = self._texts[edges[0] : edges[-1]].tobytes()
            for begin, end in pairwise(edges):
                yield part[begin - edges[0] : end - edges[0]].decode()

    def __getitem__(self, text: str) -> int:
        place = self._find(text)
        if place < 0:
            raise KeyError(text)
        return int(self._ids[place])

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self._find(text) >= 0

    def values(self) -> ValuesView[int]:
        """The ids."""
        return _Values(self)

    def items(self) -> ItemsView[str, int]:
        """The entries."""
        return _Items(self)

    def numbers(self) -> Iterator[int]:
        """The ids, in the order of the tokens."""
        for first in range(0, len(self), _PART):
            yield from self._ids[first : first + _PART].tolist()

    def compact(self) -> Iterator[bytes]:
        """The entries as JSON without spaces, in the order of the file."""
        data = np.frombuffer(self._content, np.uint8)
        out = np.empty(self._end - self._begin, np.uint8)
        size = _written_kernels.compact(data, self._begin, self._end, False, out)
        yield b"{"
        yield out[:size].tobytes()
        yield b"}"

    def canonical_json(self) -> Iterator[bytes]:
        """The entries as `canonical_json` writes a dict of them."""
        opening = b"{"
        for first in range(0, len(self), _PART):
            chosen = self._order[first : first + _PART]
            lengths = self._offsets[chosen + 1] - self._offsets[chosen]
            # One byte takes at most six, quotes, colon, comma and the id fourteen.
            out = np.empty(6 * int(lengths.sum()) + 16 * len(chosen), np.uint8)
            size = _written_kernels.write_entries(
                self._texts, self._offsets, self._ids, chosen, out
            )
            yield opening + out[: size - 1].tobytes()
            opening = b","
        yield b"}"

    def of_windows(self, table: Bool, needed: Collection[str]) -> dict[str, int]:
        """The entries that the text marked in `table` may have, and those in `needed`."""
        chosen = np.empty(len(self), np.bool_)
        _written_kernels.choose_texts(self._texts, self._offsets, table, chosen)
        chosen[[place for place in map(self._find, needed) if place >= 0]] = True
        places = np.flatnonzero(chosen)
        begins, ends = self._offsets[places].tolist(), self._offsets[places + 1].tolist()
        texts: Bytes = self._texts
        words = (
            texts[begin:end].tobytes().decode() for begin, end in zip(begins, ends, strict=True)
        )
        ids: Int32 = self._ids[places]
        return dict(zip(words, ids.tolist(), strict=True))

    def _find(self, text: str) -> int:
        try:
            wanted = np.frombuffer(text.encode(), np.uint8)
        except UnicodeEncodeError:  # half of a surrogate pair
            return -1
        return int(_written_kernels.find_text(self._texts, self._offsets, self._order, wanted))


@final
class _Values(ValuesView[int]):
    _mapping: WrittenVocabulary

    def __iter__(self) -> Iterator[int]:
        return self._mapping.numbers()


@final
class _Items(ItemsView[str, int]):
    _mapping: WrittenVocabulary

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return zip(self._mapping, self._mapping.numbers(), strict=True)
