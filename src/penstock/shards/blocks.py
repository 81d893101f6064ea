"""Blocks of documents on their way into a shard: checked, cut into batches, joined."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.errors import ConfigError
from penstock.ragged import Ragged
from penstock.shards.files import Array
from penstock.shards.layout import SPAN, ShardLayout


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SpanBlock:
    """Loss-weight spans of a block of documents."""

    spans: Ragged
    """Values of dtype `SPAN`, a row for each document."""
    valid: np.ndarray[Any, np.dtype[np.bool_]]
    """bool [documents]: False where a document has no list, so that all its weights are 1; its row is empty."""


@final
@dataclass(frozen=True, slots=True)
class Block:
    """Documents on their way into a shard."""

    tokens: Ragged
    spans: SpanBlock | None
    files: Array
    """int32 [documents]: index of the origin file."""
    lines: Array
    """int64 [documents]."""
    texts: Any
    """Arrow large_string [documents], or None."""

    def __len__(self) -> int:
        return len(self.tokens)

    def slice(self, begin: int, end: int) -> "Block":
        """Documents `begin` to `end`; values are views."""
        spans = self.spans
        if spans is not None:
            spans = SpanBlock(spans=slice_rows(spans.spans, begin, end), valid=spans.valid[begin:end])
        texts = None if self.texts is None else self.texts[begin:end]
        return Block(slice_rows(self.tokens, begin, end), spans, self.files[begin:end], self.lines[begin:end], texts)

    def span_arrays(self) -> tuple[Array, Array, tuple[Array, Array, Array]]:
        """(valid bool [n], offsets int64 [n + 1], (begins, ends, weights)); no rows where the layout has no spans."""
        if self.spans is None:
            valid, offsets, values = np.empty(0, np.bool_), np.zeros(1, np.int64), np.empty(0, SPAN)
        else:
            valid, offsets, values = self.spans.valid, self.spans.spans.offsets, self.spans.spans.values
        begins, ends, weights = (np.ascontiguousarray(values[name]) for name in ("begin", "end", "loss_weight"))
        return np.ascontiguousarray(valid), offsets, (begins, ends, weights)


def accept_block(
    layout: ShardLayout, tokens: Ragged, files: int | Array, lines: Array, spans: SpanBlock | None, texts: Any
) -> Block:
    """Check documents and bring them to the types of the layout; see `ShardWriter.write`.

    Raises:
        ConfigError: Arrays that do not fit each other or the layout, or ids outside the vocabulary.
    """
    count = len(tokens)
    if (spans is not None and not layout.has_spans) or (texts is None) == layout.has_text:
        raise ConfigError(f"spans or texts given or missing against the layout {layout}")
    if layout.has_spans and spans is None:
        none = Ragged(np.empty(0, SPAN), np.zeros(count + 1, np.int64))
        spans = SpanBlock(spans=none, valid=np.zeros(count, np.bool_))
    elif spans is not None:
        rows = Ragged(np.asarray(spans.spans.values, SPAN), np.ascontiguousarray(spans.spans.offsets, np.int64))
        spans = SpanBlock(spans=rows, valid=np.ascontiguousarray(spans.valid, np.bool_))
    origins = np.full(count, files, np.int32) if isinstance(files, (int, np.integer)) else np.asarray(files, np.int32)
    block = Block(_accept_tokens(layout, tokens), spans, origins, np.asarray(lines, np.int64), _accept_texts(texts))
    sizes = {"tokens": count, "files": len(origins), "lines": len(block.lines)}
    if spans is not None:
        _check_rows(spans.spans, "spans")
        sizes |= {"spans": len(spans.spans), "valid": len(spans.valid)}
        if spans.spans.lengths[~spans.valid[: len(spans.spans)]].any():
            raise ConfigError("spans given for a document that is marked as having none (valid is False)")
    if block.texts is not None:
        sizes["texts"] = len(block.texts)
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"arrays are of different numbers of documents: {sizes}")
    return block


def _accept_tokens(layout: ShardLayout, tokens: Ragged) -> Ragged:
    _check_rows(tokens, "tokens")
    values = np.ascontiguousarray(tokens.values)
    if len(values) and (int(values.max()) >= layout.vocab_size or int(values.min()) < 0):
        raise ConfigError(
            f"token ids from {values.min()} to {values.max()}, the vocabulary has 0 to {layout.vocab_size - 1}; "
            "was another tokenizer used?"
        )
    if int(tokens.lengths.max(initial=0)) >= 2**32:
        raise ConfigError(f"a document of {tokens.lengths.max()} tokens; at most 2^32 - 1")
    return Ragged(values.astype(layout.token_dtype, copy=False), np.ascontiguousarray(tokens.offsets, np.int64))


def _accept_texts(texts: Any) -> Any:
    if texts is None:
        return None
    import pyarrow as pa

    if texts.null_count:
        raise ConfigError(f"{texts.null_count} texts are null; give each document its text")
    return texts.cast(pa.large_string())


def _check_rows(rows: Ragged, name: str) -> None:
    ends = rows.offsets
    if not len(ends) or ends[0] != 0 or ends[-1] != len(rows.values) or (np.diff(ends) < 0).any():
        raise ConfigError(f"offsets of {name} must rise from 0 to {len(rows.values)}, the number of values")


def slice_rows(rows: Ragged, begin: int, end: int) -> Ragged:
    """Rows `begin` to `end`, with offsets that start at 0; values are a view."""
    offsets = rows.offsets[begin : end + 1]
    return Ragged(rows.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def join_blocks(blocks: Sequence[Block], room: Callable[[int], Array]) -> Block:
    """Blocks end to end, as one; `room` gives the array for so many tokens, of which no block may have some."""
    if len(blocks) == 1:
        return blocks[0]
    import pyarrow as pa

    parts = [block.spans for block in blocks if block.spans is not None]
    spans = None
    if parts:
        rows = _join_rows([part.spans for part in parts], None)
        spans = SpanBlock(spans=rows, valid=np.concatenate([part.valid for part in parts]))
    texts = None if blocks[0].texts is None else pa.concat_arrays([block.texts for block in blocks])
    return Block(
        _join_rows([block.tokens for block in blocks], room(sum(len(block.tokens.values) for block in blocks))),
        spans,
        np.concatenate([block.files for block in blocks]),
        np.concatenate([block.lines for block in blocks]),
        texts,
    )


def _join_rows(parts: Sequence[Ragged], out: Array | None) -> Ragged:
    ends = np.cumsum([0, *(len(part.values) for part in parts)])
    offsets = [part.offsets[1:] + end for part, end in zip(parts, ends[:-1], strict=True)]
    values = np.concatenate([part.values for part in parts], out=out)
    return Ragged(values, np.concatenate([np.zeros(1, np.int64), *offsets]))
