"""Encodes single pieces: by a kernel that merges, or by the tokenizers package.

The package's own model encodes a piece by itself, as it does in a text: it never sees a piece's
neighbours. It takes 7 µs a piece, so a kernel does what is plain: pieces whose bytes all have
tokens, merged by rank. The package keeps the rest, with whatever it does about unknown bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from penstock.core.arrays import Array, Bytes, Int64, UInt32
from penstock.core.errors import TokenizerError
from penstock.core.json_values import JsonObject
from penstock.tokenizers._id_kernels import fill_merges, merge_pieces, spell_pieces
from penstock.tokenizers.encoder import merge_pairs
from penstock.tokenizers.spelling import spell_as_characters, spell_byte_level
from tokenizers import AddedToken, Tokenizer

LONGEST = 128
"""Bytes of the longest piece that the kernel merges: it takes the square of the length."""

_MOST_FILLERS = 100_000
_SEPARATORS = [chr(code) for code in range(0xE000, 0xE100)]
"""Characters that stand for no byte, so no piece has one; the vocabulary might."""
_CHARACTERS = [spell_as_characters(bytes([byte])) for byte in range(256)]
_ALPHABET = np.array(list(map(ord, _CHARACTERS)), np.uint16)


@final
class PackageModel:
    """The model of an encoder of the tokenizers package, for pieces alone."""

    def __init__(self, encoder: Tokenizer, highest: int) -> None:
        """Share the model of an encoder.

        Args:
            encoder: It has a BPE of byte-level characters.
            highest: The highest id of its model.

        Raises:
            TokenizerError: Its ids are too scattered to tell pieces apart.
        """
        self._encoder = Tokenizer(encoder.model)
        # An entry between pieces makes the package cut there; its id must be none of the model's.
        # New entries get the ids after the number of entries, which may be taken.
        fillers = highest + 1 - self._encoder.get_vocab_size(with_added_tokens=False)
        if fillers > _MOST_FILLERS:
            raise TokenizerError(f"its {highest + 1} ids have {fillers} gaps")
        known = self._encoder.token_to_id
        between = next((one for one in _SEPARATORS if known(one) is None), None)
        if between is None:
            raise TokenizerError("its vocabulary has every separator that could be used")
        self._between = ord(between)
        names = [*(f"\uf8ff{place}" for place in range(max(fillers, 0))), between]
        self._encoder.add_special_tokens(
            [AddedToken(name, special=True, normalized=False) for name in names]
        )
        self._separator = known(between) or 0
        if self._separator <= highest:
            raise TokenizerError("its ids have gaps that cannot be filled")

    def encode(self, data: Bytes, begins: Int64, ends: Int64) -> tuple[UInt32, Int64]:
        """Ids of pieces.

        Args:
            data: The bytes that they are of, read-only.
            begins: Where each begins, int64 [pieces].
            ends: Where each ends, int64 [pieces].

        Returns:
            Their ids, and where those of each begin, int64 [pieces + 1].
        """
        count = len(begins)
        spelled = np.empty(int((ends - begins).sum()) + count, np.uint16)
        spell_pieces(data, begins, ends, _ALPHABET, self._between, spelled)
        text = spelled.tobytes().decode("utf-16-le")
        ids = np.array(self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        between = np.flatnonzero(ids == self._separator)
        if len(between) != count:
            raise AssertionError("the ids of a piece include the separator")
        bounds = np.concatenate(([0], between - np.arange(count)))
        return np.delete(ids, between).astype(np.uint32), bounds


@final
class PieceModel:
    """Encodes pieces as the BPE of an encoder of the tokenizers package does."""

    def __init__(self, model: JsonObject, encoder: Tokenizer) -> None:
        """Read the merges.

        Args:
            model: The model of a `tokenizer.json`.
            encoder: Its encoder.

        Raises:
            TokenizerError: See `PackageModel`.
        """
        vocabulary = dict(model["vocab"])
        self._package = PackageModel(encoder, max(vocabulary.values(), default=-1))
        self._byte_ids = np.array([vocabulary.get(one, -1) for one in _CHARACTERS], np.int64)
        self._merges = _merge_table(vocabulary, model.get("merges") or ())
        self.whole = self._whole(vocabulary) if model.get("ignore_merges") else {}
        """Pieces that are tokens although no merges make them (`ignore_merges`), and their ids."""

    def encode(self, data: Bytes, begins: Int64, ends: Int64) -> tuple[UInt32, Int64]:
        """Ids of pieces, none in `whole`, and where those of each begin, int64 [pieces + 1].

        Args:
            data: The bytes that they are of, read-only.
            begins: Where each begins, int64 [pieces].
            ends: Where each ends, int64 [pieces].
        """
        ids, starts, counts = self._merge(data, begins, ends)
        others = np.flatnonzero(counts < 0)
        if not len(others):
            return ids, np.append(starts, len(ids))
        more, bounds = self._package.encode(data, begins[others], ends[others])
        starts[others] = len(ids) + bounds[:-1]
        counts[others] = np.diff(bounds)
        bounds = np.concatenate(([0], np.cumsum(counts)))
        places = np.repeat(starts - bounds[:-1], counts) + np.arange(bounds[-1])
        return np.concatenate([ids, more])[places], bounds

    def _merge(self, data: Bytes, begins: Int64, ends: Int64) -> tuple[UInt32, Int64, Int64]:
        """Ids; where those of each piece begin; and their number, -1 for one that is left out."""
        ids = np.empty(int((ends - begins).sum()), np.uint32)
        starts, counts = np.empty((2, len(begins)), np.int64)
        total = merge_pieces(
            data, begins, ends, self._byte_ids, self._merges, LONGEST, ids, starts, counts
        )
        return ids[:total], starts, counts

    def _whole(self, vocabulary: Mapping[str, int]) -> dict[bytes, int]:
        spelled = spell_byte_level(vocabulary)
        tokens = [one for one in zip(spelled, vocabulary.values(), strict=True) if one[0]]
        words = [word for word, _ in tokens if word is not None]
        numbers = np.array([number for _, number in tokens], np.int64)
        ends = np.cumsum([len(word) for word in words], dtype=np.int64)
        begins = np.concatenate(([0], ends[:-1])).astype(np.int64)
        ids, starts, counts = self._merge(np.frombuffer(b"".join(words), np.uint8), begins, ends)
        made = counts == 1
        made[made] = ids[starts[made]] == numbers[made]
        return {words[place]: int(numbers[place]) for place in np.flatnonzero(~made)}


def _merge_table(vocabulary: Mapping[str, int], merges: Sequence[Any]) -> Array:
    """The hash table of merges; see `fill_merges`."""
    get = vocabulary.__getitem__
    lefts: list[int] = []
    rights: list[int] = []
    made: list[int] = []
    for left, right in merge_pairs(merges):
        lefts.append(get(left))
        rights.append(get(right))
        made.append(get(left + right))
    table = np.full(2 << max(2 * len(made), 1).bit_length(), ~np.uint64(0))
    ids = [np.array(column, np.uint32) for column in (lefts, rights, made)]
    fill_merges(ids[0], ids[1], ids[2], table)
    return table
