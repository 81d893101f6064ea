"""A second fast encoder, for byte-level BPE of a `tokenizer.json`: by pieces, whose ids are kept.

For vocabularies that gigatoken does not take: Falcon's steps after the bytes, a split pattern of
one's own, many bytes without a token. Texts are cut by `splitter`, and pieces encoded by
`piece_cache`. Texts with an added entry are left to the own encoder, which cuts at it; those that a
normal form may change are normalised by the package first.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.arrays import Bool, Int64, UInt32
from penstock.core.errors import TokenizerError
from penstock.core.json_values import JsonObject
from penstock.core.ragged import Ragged
from penstock.tokenizers.byte_level import byte_level_encoder
from penstock.tokenizers.fast import Encoder, text_buffers
from penstock.tokenizers.normal_forms import NormalForms
from penstock.tokenizers.piece_cache import PieceCache, frozen
from penstock.tokenizers.piece_model import PieceModel
from penstock.tokenizers.splitter import Splitter
from tokenizers import Tokenizer

MOST_ENTRIES = 64
"""Added entries; texts are searched for each."""
BLOCK_BYTES = 1 << 19
"""Texts that are cut at once; bounds memory, and fits caches."""
MOST_BYTES = 1 << 31


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PieceEncoder:
    """Encodes texts by their pieces."""

    name: str = "penstock"
    splitter: Splitter
    cache: PieceCache
    forms: NormalForms | None
    """What is done to texts first."""
    entries: tuple[str, ...] = ()
    """Texts that have one are for the own encoder."""
    probes: tuple[str, ...] = (
        "a1b 22  333\n4 \n5 it's 1's\t\t2 67890 x\u0663\u0301y \u00b2\u00bd\u2167 z1\u0308",
        "",
        " \r\n\r\n  \t(x)...y 'S IT\u2019S don't\u3000\u6c34\u4e00",
    )
    """Texts that would show a fault in cutting."""

    def encode(self, text: str) -> UInt32 | None:
        """Ids of a text; None: the own encoder must encode it."""
        ids, left_out = self.encode_batch(pa.array([text], pa.large_string()))
        return None if len(left_out) else ids.values

    def encode_batch(self, texts: pa.Array) -> tuple[Ragged, Int64]:
        """Encode an Arrow (large) string array without nulls.

        Returns:
            uint32 ids and int64 offsets, one row per text; and the rows that the own encoder must
            encode, whose ids are wrong.
        """
        left_out = self._with_entries(texts)
        if self.forms is not None:
            texts, data, offsets = self.forms.normalise(texts)
            left_out |= self._with_entries(texts)
        else:
            data, offsets = text_buffers(texts)
        left_out |= np.diff(offsets) >= MOST_BYTES
        if left_out.any():
            kept = pc.if_else(pa.array(left_out), "", texts)
            data, offsets = text_buffers(kept)
        parts: list[UInt32] = []
        bounds = [np.zeros(1, np.int64)]
        done = 0
        for low, high in _blocks(offsets):
            block = frozen(data[offsets[low] : offsets[high]])
            pieces = self.splitter.cut(block, offsets[low : high + 1] - offsets[low])
            ids, ends = self.cache.encode(block, pieces.places)
            parts.append(ids)
            bounds.append(done + ends[pieces.rows[1:]])
            done += len(ids)
        values = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint32), *parts])
        return Ragged(values, np.concatenate(bounds)), np.flatnonzero(left_out)

    def _with_entries(self, texts: pa.Array) -> Bool:
        """The texts that have an added entry, bool [texts]."""
        found = np.zeros(len(texts), np.bool_)
        for entry in self.entries:
            found |= pc.match_substring(texts, entry).to_numpy(zero_copy_only=False)
        return found


def fast_byte_level(
    scrubbed: JsonObject,
    own: Callable[[], Tokenizer],
    size: int,
    content: Collection[str],
    missing: str | None,
) -> Encoder:
    """The fast encoder of a byte-level BPE: gigatoken's, or ours of pieces.

    Args:
        scrubbed: A `tokenizer.json` without control entries.
        own: Gives the own encoder, made of it.
        size: One more than its highest id.
        content: Its added entries that are content.
        missing: Why gigatoken does not load here; None: it does.

    Raises:
        TokenizerError: Neither can encode it; the message has both reasons.
    """
    try:
        if missing is None:
            return byte_level_encoder(scrubbed, size, content)
    except TokenizerError as error:
        missing = str(error)
    try:
        return piece_encoder(scrubbed, own(), content)
    except TokenizerError as error:
        raise TokenizerError(f"{missing}; nor can penstock: {error}") from error


def piece_encoder(scrubbed: JsonObject, own: Tokenizer, content: Collection[str]) -> PieceEncoder:
    """The encoder of a byte-level BPE.

    Args:
        scrubbed: A `tokenizer.json` without control entries.
        own: The own encoder, made of it.
        content: Its added entries that are content.

    Raises:
        TokenizerError: It is not supported; the message is the reason.
    """
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if scrubbed["model"].get(name):
            raise TokenizerError(f"it has a {name}")
    normalizer = scrubbed.get("normalizer")
    forms = None if normalizer is None else NormalForms(normalizer)
    splitter = Splitter(scrubbed.get("pre_tokenizer"))
    entries = _shortest(content if forms is None else {*content, *map(forms.apply, content)})
    if len(entries) > MOST_ENTRIES:
        raise TokenizerError(f"it has more than {MOST_ENTRIES} added entries, none in another")
    return PieceEncoder(
        splitter=splitter,
        cache=PieceCache(PieceModel(scrubbed["model"], own), splitter.cut_words),
        forms=forms,
        entries=entries,
    )


def _shortest(entries: Collection[str]) -> tuple[str, ...]:
    """Those in which there is no other: a text that has another one has one of these."""
    kept: list[str] = []
    for entry in sorted(entries, key=len):
        if entry and not any(one in entry for one in kept):
            kept.append(entry)
        if len(kept) > MOST_ENTRIES:
            break
    return tuple(kept)


def _blocks(offsets: Int64) -> Iterator[tuple[int, int]]:
    """First and last row of blocks of texts."""
    low, rows = 0, len(offsets) - 1
    while low < rows:
        high = int(np.searchsorted(offsets, offsets[low] + BLOCK_BYTES, side="right")) - 1
        high = min(max(high, low + 1), rows)
        yield low, high
        low = high
