"""Turns blocks of texts into documents: encodes them, adds BOS and EOS, and puts loss-weight spans
on the tokens.

Spans come from character ranges and do not affect the tokenization. A token has the weight of its
last byte: most vocabularies put the space before a word into the word's token, so an answer that
begins after a space keeps its first word. EOS has the weight of the text's last character; BOS is
never a target.

Text that spells BOS at its very start, or EOS at its very end, is replaced by the added token, so
that neither occurs twice; if none is added, it stays text.
"""

from dataclasses import dataclass, field
from typing import final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.arrays import Bool, Bytes, Int32, Int64
from penstock.core.arrow import from_numpy, from_texts, to_numpy
from penstock.core.errors import ConfigError, TokenizerError
from penstock.core.ragged import Ragged
from penstock.core.randomness import key_for
from penstock.data.prepare import _kernels as k
from penstock.data.prepare.settings import PrepareSettings
from penstock.data.reports.chat_summary import ChatSummary
from penstock.data.shards import SpanBlock
from penstock.data.shards.format.images import ImageOf
from penstock.data.shards.format.layout import SPAN, Column
from penstock.data.shards.format.trees import Tree
from penstock.data.sources import RecordBlock, Reject, Weights
from penstock.data.sources.records import excerpt
from penstock.tokenizers import Tokenizer

Integers = Int64
_SPLIT_KEY = np.uint64(key_for(0, "prepare", "validation"))


@final
@dataclass(frozen=True, slots=True)
class Framing:
    """The control tokens around each document; −1: none."""

    bos: int
    eos: int
    bos_text: str
    eos_text: str

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: PrepareSettings) -> "Framing":
        """Choose by tokenizer and settings.

        Raises:
            ConfigError: The settings require a control token that the tokenizer lacks.
        """
        for name, choice, token_id in (
            ("add_bos", settings.add_bos, tokenizer.bos_id),
            ("add_eos", settings.add_eos, tokenizer.eos_id),
        ):
            if choice == "yes" and token_id is None:
                raise ConfigError(
                    f"{name} is yes, but the tokenizer {tokenizer.name} has no such token; "
                    "use auto or no"
                )
        eos = tokenizer.eos_id if settings.add_eos != "no" else None
        bos = tokenizer.bos_id if settings.add_bos == "yes" else None
        if settings.add_bos == "auto" and tokenizer.begin_ids:
            bos = tokenizer.begin_ids[0]
        names = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
        return cls(
            -1 if bos is None else bos,
            -1 if eos is None else eos,
            "" if bos is None else names.get(bos, ""),
            "" if eos is None else names.get(eos, ""),
        )


@final
@dataclass(frozen=True, slots=True)
class Documents:
    """Encoded documents of one block and one split."""

    tokens: Ragged
    spans: SpanBlock | None
    texts: pa.Array
    lines: Integers
    files: Int32
    text_sizes: Integers
    """UTF-8 bytes that the tokens of each represent."""
    trees: list[Tree | None] | None = None
    """Branches and paths of each, where answers are kept; None: the dataset has no trees."""
    columns: dict[str, Ragged] = field(default_factory=dict)
    """Name → a number for each token."""
    images: list[list[ImageOf]] | None = None
    """Those of each; None: the dataset has no images."""

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes that the tokens represent."""
        return int(self.text_sizes.sum())


@final
@dataclass(frozen=True, slots=True)
class Encoded:
    """The result of one block of records."""

    splits: dict[str, Documents]
    rejects: list[Reject]
    straddling: int
    """Tokens that hold characters of different loss weights."""
    edge_controls: int
    """Texts that spelled BOS at their start or EOS at their end."""
    dropped: int = 0
    """Records removed by the clean-up of chats."""
    more_documents: int = 0
    """Documents beyond the first of their record."""
    chats: ChatSummary | None = None
    """Statistics about chats."""
    weighted: int = 0
    """Records with loss weights of their own."""


def encode_block(
    block: RecordBlock,
    files: tuple[str, ...],
    tokenizer: Tokenizer,
    framing: Framing,
    settings: PrepareSettings,
) -> Encoded:
    """Encode the records of a block.

    Args:
        block: The records.
        files: Names that `block.files` points into.
        tokenizer: The tokenizer.
        framing: BOS and EOS.
        settings: Split and spans.
    """
    if not len(block):
        return Encoded({}, [], 0, 0)
    texts, weights, edge_controls = _without_edges(block.texts, block.weights, framing)
    ids = tokenizer.encode_batch(texts)
    good = np.diff(text_offsets(texts)) > 0
    good &= ids.lengths > 0
    reasons = dict.fromkeys(
        np.flatnonzero(~good).tolist(), "the text encodes to no token, or only spells BOS and EOS"
    )
    ends = None
    if weights is not None and weights.present.any():
        ends, problems = _token_ends(tokenizer, texts, ids, weights, good)
        reasons |= problems
        good[list(problems)] = False
    rejects = [
        Reject(
            files[block.files[row]],
            int(block.lines[row]),
            reason,
            excerpt(block.texts[row].as_py()),
        )
        for row, reason in sorted(reasons.items())
    ]
    splits: dict[str, Documents] = {}
    straddling = 0
    for split, chosen in split_rows(texts, settings).items():
        rows = np.flatnonzero(chosen & good)
        if not len(rows):
            continue
        tokens = frame(ids, rows, framing, tokenizer.vocab_size)
        spans = None
        if settings.fields.weights:
            spans, count = _spans(texts, ids, ends, weights, rows, framing)
            straddling += count
        sizes = np.diff(text_offsets(texts))[rows]
        kept = texts.take(from_numpy(rows)) if settings.keep_text else None
        columns = {
            column.name: _column(block, name, column, texts, ids, rows, tokens, framing, tokenizer)
            for name, column in zip(settings.token_columns, settings.columns, strict=True)
        }
        splits[split] = Documents(
            tokens, spans, kept, block.lines[rows], block.files[rows], sizes, columns=columns
        )
    weighted = int(weights.present[good].sum()) if weights is not None else 0
    return Encoded(splits, rejects, straddling, edge_controls, weighted=weighted)


def _column(
    block: RecordBlock,
    name: str,
    column: Column,
    texts: pa.Array,
    ids: Ragged,
    rows: Integers,
    tokens: Ragged,
    framing: Framing,
    tokenizer: Tokenizer,
) -> Ragged:
    """A number for each token of the chosen documents.

    One number is that of all tokens of its document, BOS and EOS among them. Of ranges of
    characters, a token has the number of its last character, as with loss weights; BOS and EOS have
    the fill.
    """
    values = block.columns[name].to_pylist()
    out = np.full(len(tokens.values), column.fill, np.dtype(column.dtype))
    for place, row in enumerate(rows.tolist()):
        given, inside = values[row], out[tokens.offsets[place] : tokens.offsets[place + 1]]
        if isinstance(given, list):
            ends = tokenizer.token_ends_batch(
                texts.slice(row, 1), Ragged(ids[row], np.array([0, len(ids[row])]))
            ).values
            data = np.frombuffer(texts[row].as_py().encode(), np.uint8)
            last = np.cumsum((data & 0xC0) != 0x80)[ends - 1] - 1
            head = int(framing.bos >= 0 and ids[row][0] != framing.bos)
            for part in given:
                inside[head : head + len(last)][(last >= part["begin"]) & (last < part["end"])] = (
                    part["value"]
                )
        elif given is not None:
            inside[:] = given
    return Ragged(out, tokens.offsets)


def frame(ids: Ragged, rows: Integers, framing: Framing, vocab_size: int) -> Ragged:
    """The chosen rows of `ids` with BOS and EOS, in the dtype of the shard."""
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    out = np.empty(int(ids.lengths[rows].sum()) + 2 * len(rows), dtype)
    offsets = np.empty(len(rows) + 1, np.int64)
    k.frame(ids.values, ids.offsets, rows, framing.bos, framing.eos, out, offsets)
    return Ragged(out[: offsets[-1]], offsets)


def text_offsets(texts: pa.Array) -> Integers:
    """Byte offsets of a large string array, int64 [n + 1]."""
    if not len(texts):
        return np.zeros(1, np.int64)
    offsets: Integers = np.frombuffer(texts.buffers()[1], np.int64)[
        texts.offset : texts.offset + len(texts) + 1
    ]
    return offsets


def text_bytes(texts: pa.Array) -> Bytes:
    """The buffer that `text_offsets` points into."""
    data = texts.buffers()[2]
    return np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)


def split_rows(texts: pa.Array, settings: PrepareSettings) -> dict[str, Bool]:
    """Split → bool [texts], which documents belong to it; decided by a hash of the text alone."""
    if not settings.validation:
        return {"": np.ones(len(texts), np.bool_)}
    hashes = np.empty(len(texts), np.uint64)
    k.hash_texts(text_bytes(texts), text_offsets(texts), _SPLIT_KEY, hashes)
    held_out = hashes < np.uint64(min(int(settings.validation * 2.0**64), 2**64 - 1))
    return {"train": ~held_out, "validation": held_out}


def _without_edges(
    texts: pa.Array, weights: Weights | None, framing: Framing
) -> tuple[pa.Array, Weights | None, int]:
    """Remove a spelled BOS from the start and a spelled EOS from the end of texts that will get the
    real tokens.
    """
    starts = (
        to_numpy(pc.starts_with(texts, framing.bos_text))
        if framing.bos_text
        else np.zeros(len(texts), np.bool_)
    )
    stops = (
        to_numpy(pc.ends_with(texts, framing.eos_text))
        if framing.eos_text
        else np.zeros(len(texts), np.bool_)
    )
    rows = np.flatnonzero(starts | stops)
    if not len(rows):
        return texts, weights, 0
    values = texts.to_pylist()
    for row in rows:
        if starts[row]:
            values[row] = values[row].removeprefix(framing.bos_text)
        if stops[row]:
            values[row] = values[row].removesuffix(framing.eos_text)
    texts = from_texts(values)
    if weights is not None:
        owner = np.repeat(np.arange(len(values)), np.diff(weights.offsets))
        shift = np.where(starts, len(framing.bos_text), 0)[owner]
        longest = np.array([len(value) for value in values], np.int64)[owner]
        begin, end = (np.clip(part - shift, 0, longest) for part in (weights.begin, weights.end))
        weights = Weights(weights.offsets, begin, end, weights.weight, weights.present)
    return texts, weights, len(rows)


def _token_ends(
    tokenizer: Tokenizer,
    texts: pa.Array,
    ids: Ragged,
    weights: Weights,
    good: Bool,
) -> tuple[Integers, dict[int, str]]:
    """Byte position after each token; and document → the reason why its tokens have no byte
    positions.
    """
    try:
        return tokenizer.token_ends_batch(texts, ids).values, {}
    except TokenizerError:
        ends = np.zeros(len(ids.values), np.int64)
        problems = {}
        for row in np.flatnonzero(weights.present & good).tolist():
            try:
                ends[ids.offsets[row] : ids.offsets[row + 1]] = tokenizer.token_ends(
                    texts[row].as_py(), ids[row]
                )
            except TokenizerError as error:
                problems[row] = f"its loss weights cannot be put on tokens: {error}"
        return ends, problems


def _spans(
    texts: pa.Array,
    ids: Ragged,
    ends: Integers | None,
    weights: Weights | None,
    rows: Integers,
    framing: Framing,
) -> tuple[SpanBlock, int]:
    """Spans of the chosen documents."""
    if weights is None or ends is None:
        none = Ragged(np.empty(0, SPAN), np.zeros(len(rows) + 1, np.int64))
        return SpanBlock(spans=none, valid=np.zeros(len(rows), np.bool_)), 0
    begin, end = np.empty_like(weights.begin), np.empty_like(weights.end)
    offsets = text_offsets(texts)
    k.characters_to_bytes(
        text_bytes(texts), offsets, weights.offsets, weights.begin, weights.end, begin, end
    )
    ranges = _pick(Ragged(np.arange(len(begin)), weights.offsets), rows)
    tokens = _pick(Ragged(ends, ids.offsets), rows)
    values = np.zeros(len(ranges.values) + len(rows), SPAN)
    out = tuple(
        np.empty(len(values), values.dtype[name]) for name in ("begin", "end", "loss_weight")
    )
    out_offsets = np.empty(len(rows) + 1, np.int64)
    first = (ids.values[ids.offsets[rows]] != framing.bos).astype(np.int64) * (framing.bos >= 0)
    extra = (ids.values[ids.offsets[rows + 1] - 1] != framing.eos).astype(np.int64) * (
        framing.eos >= 0
    )
    picked = (
        ranges.offsets,
        begin[ranges.values],
        end[ranges.values],
        weights.weight[ranges.values],
    )
    straddling = k.mark_spans(
        np.diff(offsets)[rows],
        tokens.values,
        tokens.offsets,
        picked,
        weights.present[rows],
        first,
        extra,
        out,
        out_offsets,
    )
    for name, column in zip(("begin", "end", "loss_weight"), out, strict=True):
        values[name] = column
    return SpanBlock(
        spans=Ragged(values[: out_offsets[-1]], out_offsets), valid=weights.present[rows]
    ), int(straddling)


def _pick(rows: Ragged, chosen: Integers) -> Ragged:
    """Some rows of a ragged array, copied."""
    if len(chosen) == len(rows):
        return rows
    return Ragged.from_rows([rows[row] for row in chosen.tolist()], rows.values.dtype)
