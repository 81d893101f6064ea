"""Blocks of documents on their way to a shard: checked, converted to its types, cut and joined."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import pyarrow as pa

from penstock.core.arrays import Array, Bool
from penstock.core.errors import ConfigError
from penstock.core.ragged import Ragged
from penstock.data.shards.format.layout import SPAN, ShardLayout
from penstock.data.shards.format.trees import Tree, tree_words


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SpanBlock:
    """Loss-weight spans of a block of documents."""

    spans: Ragged
    """Values of dtype `SPAN`, one row per document."""
    valid: Bool
    """bool [documents]: False: the document has no list, so all its weights are 1; its row is
    empty.
    """


def spans_of(weights: Ragged) -> SpanBlock:
    """Loss-weight spans of documents, from a weight per token (float32, one row per document)."""
    values, offsets = weights.values, weights.offsets
    starts = np.zeros(len(values), np.bool_)
    starts[1:] = values[1:] != values[:-1]
    starts[offsets[:-1][weights.lengths > 0]] = True
    begins = np.flatnonzero(starts)
    ends = np.append(begins[1:], len(values))[: len(begins)]
    counts = values[begins] != 0
    begins, ends = begins[counts], ends[counts]
    owners = np.searchsorted(offsets, begins, "right") - 1
    spans = np.empty(len(begins), SPAN)
    spans["begin"], spans["end"] = begins - offsets[owners], ends - offsets[owners]
    spans["loss_weight"] = values[begins]
    rows = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=len(weights)))])
    return SpanBlock(spans=Ragged(spans, rows), valid=np.ones(len(weights), np.bool_))


@final
@dataclass(frozen=True, slots=True)
class Block:
    """Documents to be written to a shard."""

    tokens: Ragged
    spans: SpanBlock | None
    files: Array
    """int32 [documents]: index of the origin file."""
    lines: Array
    """int64 [documents]."""
    texts: pa.Array | None
    """Arrow large_string [documents], or None."""
    extras: tuple[Ragged, ...] = ()
    """Words of trees, and columns, a row for each document, in the order of the layout."""

    def __len__(self) -> int:
        return len(self.lines)

    def slice(self, begin: int, end: int) -> "Block":
        """Documents `begin` to `end`; values are views."""
        spans = self.spans
        if spans is not None:
            spans = SpanBlock(
                spans=slice_rows(spans.spans, begin, end), valid=spans.valid[begin:end]
            )
        texts = None if self.texts is None else self.texts[begin:end]
        extras = tuple(slice_rows(rows, begin, end) for rows in self.extras)
        tokens = slice_rows(self.tokens, begin, end)
        return Block(tokens, spans, self.files[begin:end], self.lines[begin:end], texts, extras)

    def span_arrays(self) -> tuple[Array, Array, tuple[Array, Array, Array]]:
        """(valid bool [n], offsets int64 [n + 1], (begins, ends, weights)); empty if the layout has
        no spans.
        """
        if self.spans is None:
            valid, offsets, values = np.empty(0, np.bool_), np.zeros(1, np.int64), np.empty(0, SPAN)
        else:
            valid, offsets, values = (
                self.spans.valid,
                self.spans.spans.offsets,
                self.spans.spans.values,
            )
        begins, ends, weights = (
            np.ascontiguousarray(values[name]) for name in ("begin", "end", "loss_weight")
        )
        return np.ascontiguousarray(valid), offsets, (begins, ends, weights)


def accept_block(
    layout: ShardLayout,
    tokens: Ragged,
    files: int | Array,
    lines: Array,
    spans: SpanBlock | None,
    texts: pa.Array,
    trees: Sequence[Tree | None] | None = None,
    columns: Mapping[str, Ragged] | None = None,
    images: Ragged | None = None,
) -> Block:
    """Check documents and convert them to the types of the layout; see `ShardWriter.write`.

    Raises:
        ConfigError: Arrays that do not fit each other or the layout, or ids outside the vocabulary.
    """
    count = len(tokens)
    if (spans is not None and not layout.has_spans) or (texts is None) == layout.has_text:
        raise ConfigError(f"spans or texts are given or missing, contrary to the layout {layout}")
    if layout.has_spans and spans is None:
        none = Ragged(np.empty(0, SPAN), np.zeros(count + 1, np.int64))
        spans = SpanBlock(spans=none, valid=np.zeros(count, np.bool_))
    elif spans is not None:
        rows = Ragged(
            np.asarray(spans.spans.values, SPAN),
            np.ascontiguousarray(spans.spans.offsets, np.int64),
        )
        spans = SpanBlock(spans=rows, valid=np.ascontiguousarray(spans.valid, np.bool_))
    origins = (
        np.full(count, files, np.int32)
        if isinstance(files, (int, np.integer))
        else np.asarray(files, np.int32)
    )
    accepted = _accept_tokens(layout, tokens)
    extras = _accept_extras(layout, accepted, trees, images, columns or {})
    block = Block(
        accepted, spans, origins, np.asarray(lines, np.int64), _accept_texts(texts), extras
    )
    sizes = {"tokens": count, "files": len(origins), "lines": len(block.lines)}
    if spans is not None:
        _check_rows(spans.spans, "spans")
        sizes |= {"spans": len(spans.spans), "valid": len(spans.valid)}
        if spans.spans.lengths[~spans.valid[: len(spans.spans)]].any():
            raise ConfigError(
                "a document that is marked as having no spans (valid is False) has some"
            )
    if block.texts is not None:
        sizes["texts"] = len(block.texts)
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"arrays have different numbers of documents: {sizes}")
    return block


def _accept_tokens(layout: ShardLayout, tokens: Ragged) -> Ragged:
    _check_rows(tokens, "tokens")
    values = np.ascontiguousarray(tokens.values)
    if len(values) and (int(values.max()) >= layout.vocab_size or int(values.min()) < 0):
        raise ConfigError(
            f"token ids from {values.min()} to {values.max()}, but the vocabulary has 0 to "
            f"{layout.vocab_size - 1}; was another tokenizer used?"
        )
    if int(tokens.lengths.max(initial=0)) >= 2**32:
        raise ConfigError(f"a document of {tokens.lengths.max()} tokens; at most 2^32 - 1")
    return Ragged(
        values.astype(layout.token_dtype, copy=False),
        np.ascontiguousarray(tokens.offsets, np.int64),
    )


def _accept_extras(
    layout: ShardLayout,
    tokens: Ragged,
    trees: Sequence[Tree | None] | None,
    images: Ragged | None,
    columns: Mapping[str, Ragged],
) -> tuple[Ragged, ...]:
    """Words of trees, of images, then columns, in the order of the layout."""
    if (images is None) == layout.has_images:
        raise ConfigError(f"images are given or missing, contrary to the layout {layout}")
    if (trees is None) == layout.has_trees or set(columns) != {
        column.name for column in layout.columns
    }:
        raise ConfigError(
            f"trees or columns ({', '.join(columns) or 'none'}) are given or missing, "
            f"contrary to the layout {layout}"
        )
    extras = [] if trees is None else [tree_words(trees, tokens.lengths.tolist())]
    extras += [] if images is None else [images]
    for column in layout.columns:
        rows = columns[column.name]
        _check_rows(rows, f"column {column.name!r}")
        if (
            len(rows) != len(tokens)
            or (wrong := np.flatnonzero(rows.lengths != tokens.lengths)).size
        ):
            at = int(wrong[0]) if len(rows) == len(tokens) else min(len(rows), len(tokens))
            found = (
                f"{rows.lengths[at]} numbers for {tokens.lengths[at]} tokens"
                if at < len(rows)
                else "is missing"
            )
            raise ConfigError(
                f"column {column.name!r}: document {at}: {found}; give a number for each token"
            )
        values = np.asarray(rows.values)
        if values.dtype.kind not in "fiu" or (column.dtype == "int32" and values.dtype.kind == "f"):
            raise ConfigError(
                f"column {column.name!r} holds {values.dtype}, expected {column.dtype}"
            )
        if (
            column.dtype == "int32"
            and values.size
            and not -(2**31) <= values.min() <= values.max() < 2**31
        ):
            raise ConfigError(
                f"column {column.name!r} holds {values.min()} to {values.max()}, which do not "
                "fit int32"
            )
        extras.append(Ragged(values.astype(column.dtype), rows.offsets))
    return tuple(extras)


def _accept_texts(texts: pa.Array | None) -> pa.Array | None:
    if texts is None:
        return None
    if texts.null_count:
        raise ConfigError(f"{texts.null_count} texts are null; give each document its text")
    return texts.cast(pa.large_string())


def _check_rows(rows: Ragged, name: str) -> None:
    ends = rows.offsets
    if not len(ends) or ends[0] != 0 or ends[-1] != len(rows.values) or (np.diff(ends) < 0).any():
        raise ConfigError(
            f"offsets of {name} must increase from 0 to {len(rows.values)}, the number of values"
        )


def slice_rows(rows: Ragged, begin: int, end: int) -> Ragged:
    """Rows `begin` to `end`, with offsets that start at 0; values are a view."""
    offsets = rows.offsets[begin : end + 1]
    return Ragged(rows.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def join_blocks(blocks: Sequence[Block], room: Callable[[int], Array]) -> Block:
    """Join blocks into one; `room(n)` returns an array for n tokens, which must not belong to any
    of the blocks.
    """
    if len(blocks) == 1:
        return blocks[0]
    parts = [block.spans for block in blocks if block.spans is not None]
    spans = None
    if parts:
        rows = _join_rows([part.spans for part in parts], None)
        spans = SpanBlock(spans=rows, valid=np.concatenate([part.valid for part in parts]))
    texts = None if blocks[0].texts is None else pa.concat_arrays([block.texts for block in blocks])
    return Block(
        _join_rows(
            [block.tokens for block in blocks],
            room(sum(len(block.tokens.values) for block in blocks)),
        ),
        spans,
        np.concatenate([block.files for block in blocks]),
        np.concatenate([block.lines for block in blocks]),
        texts,
        tuple(
            _join_rows(parts, None)
            for parts in zip(*(block.extras for block in blocks), strict=True)
        ),
    )


def _join_rows(parts: Sequence[Ragged], out: Array | None) -> Ragged:
    ends = np.cumsum([0, *(len(part.values) for part in parts)])
    offsets = [part.offsets[1:] + end for part, end in zip(parts, ends[:-1], strict=True)]
    values = np.concatenate([part.values for part in parts], out=out)
    return Ragged(values, np.concatenate([np.zeros(1, np.int64), *offsets]))
