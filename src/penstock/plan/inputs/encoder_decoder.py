"""A packed row seen by an encoder-decoder: what is only read apart from what is predicted.

The prefix of each document goes to the encoder, everything after it is what the decoder predicts.
Documents keep their number on both sides, so the whole of attention is in document ids: an encoder
slot sees the encoder slots of its document, a decoder slot the decoder slots of its document up to
itself, and all encoder slots of its document. Padding is one more document, on both sides, so that
no attention row is empty; that is why the encoder keeps a slot of padding where the decoder has
any. Targets and their weights are the row's own, each of them and no other, so a step's loss
denominator holds. O(row) and no loop: under 0.1 ms for 4,096 slots.
"""

from dataclasses import dataclass
from typing import Annotated, Any, final

import numpy as np

from penstock.core.arrays import Array, Float32, Integers
from penstock.core.errors import ConfigError
from penstock.plan.inputs.attention import AttentionRule
from penstock.plan.inputs.model_input import IGNORE, ModelInput


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderDecoderInput:
    """The two sides of a row. E encoder slots, D decoder slots; integers have the dtype of the
    row's tokens.
    """

    encoder_tokens: Annotated[Integers, "encoder_slots"]
    """[E] tokens that are read."""
    encoder_document_ids: Annotated[Integers, "encoder_slots"]
    """[E] number of the token's document in the row; padding has the number of documents."""
    encoder_positions: Annotated[Integers, "encoder_slots"]
    """[E] position of the token in its document, from 0; restarts in the padding."""
    decoder_tokens: Annotated[Integers, "decoder_slots"]
    """[D] what the decoder is given: `start_id` first in each document, then its targets but the
    last.
    """
    decoder_targets: Annotated[Integers, "decoder_slots"]
    """[D] what it predicts, already shifted; −100 in the padding and where the row has no
    target.
    """
    decoder_loss_weights: Annotated[Float32, "decoder_slots"]
    """[D] how much each target counts; 0 where it is −100."""
    decoder_document_ids: Annotated[Integers, "decoder_slots"]
    """[D] as `encoder_document_ids`."""
    decoder_positions: Annotated[Integers, "decoder_slots"]
    """[D] position of the slot in its document's decoder side, from 0; restarts in the padding."""
    num_encoder_tokens: int
    """Encoder slots without padding."""
    num_decoder_tokens: int
    """Decoder slots without padding."""


def encoder_decoder(
    row: ModelInput, *, encoder_length: int, decoder_length: int, start_id: int, pad_id: int
) -> EncoderDecoderInput:
    """Take a row of denoised documents apart.

    The decoder never needs more than the row's own length, the encoder no more than one slot above
    it (and just the row's length where documents end in their row and have targets); less saves
    work where the shares are known.

    Args:
        row: With targets at distance 1 only, `prefix_lengths`, and `cu_seqlens` or `document_ids`.
        encoder_length: E, slots of the encoder's side.
        decoder_length: D, slots of the decoder's side.
        start_id: The token a decoder begins with; T5 takes its padding.
        pad_id: The token that fills both sides up.

    Raises:
        ConfigError: A document has no prefix or has targets inside it, the row has more distances,
            or a side is too short; names the document or the sizes.
    """
    pieces, targets, weights = _documents(row)
    begins, prefix_ends, ends = pieces.T
    tokens, slots = row.tokens[: row.num_tokens], np.arange(row.num_tokens)
    document_ids = np.repeat(np.arange(len(pieces)), ends - begins)
    reads = slots < prefix_ends[document_ids]
    # The last slot of a prefix predicts the first token after it, so it becomes the decoder's
    # start; the last slot of a document is left out, unless the document goes on past its row and
    # there is a token to predict.
    starts = prefix_ends - 1
    predicts = slots >= starts[document_ids]
    predicts[ends - 1] = targets[ends - 1] != IGNORE
    _refuse_lost_targets(targets, predicts, document_ids)
    given = tokens.copy()
    given[starts] = start_id
    encoder = _Side(np.flatnonzero(reads), encoder_length, tokens.dtype)
    decoder = _Side(np.flatnonzero(predicts), decoder_length, tokens.dtype)
    _refuse_too_short(encoder, decoder)
    return EncoderDecoderInput(
        encoder_tokens=encoder.of(tokens, pad_id),
        encoder_document_ids=encoder.of(document_ids, len(pieces)),
        encoder_positions=encoder.positions(begins[document_ids]),
        decoder_tokens=decoder.of(given, pad_id),
        decoder_targets=decoder.of(targets, IGNORE),
        decoder_loss_weights=decoder.of(weights, 0, np.float32),
        decoder_document_ids=decoder.of(document_ids, len(pieces)),
        decoder_positions=decoder.positions(starts[document_ids]),
        num_encoder_tokens=len(encoder.slots),
        num_decoder_tokens=len(decoder.slots),
    )


@final
@dataclass(frozen=True, slots=True)
class _Side:
    """The slots of a row that go to one side, which is `length` long."""

    slots: Array
    length: int
    dtype: Any

    def of(self, values: Array, fill: int, dtype: object = None) -> Array:
        """What the row's slots hold, and `fill` in the padding."""
        out = np.full(self.length, fill, dtype or self.dtype)
        out[: len(self.slots)] = values[self.slots]
        return out

    def positions(self, first: Array) -> Array:
        """Distances from each slot's `first` slot; the padding counts from 0."""
        out = np.arange(-len(self.slots), self.length - len(self.slots), dtype=self.dtype)
        out[: len(self.slots)] = self.slots - first[self.slots]
        return out


def _documents(row: ModelInput) -> tuple[Array, Array, Array]:
    """Pieces of the documents without padding [n, 3], targets and weights of their slots."""
    if len(row.targets) != 1:
        raise ConfigError(
            "an encoder-decoder view needs targets at distance 1 only, the row has "
            f"{len(row.targets)} distances: those of a prefix's last tokens would have no "
            "slot; require target_distances=1"
        )
    rule = AttentionRule.of(row)
    if rule.forked:
        raise ConfigError(
            "an encoder-decoder view of prefix trees is not defined; take rows without trees"
        )
    pieces = rule.pieces
    pieces = pieces[pieces[:, 0] < row.num_tokens]
    targets = row.targets[0, : row.num_tokens]
    trained = np.concatenate([[0], np.cumsum(targets != IGNORE)])
    # Without words (BOS and EOS alone, or an EOS that was split off) there is nothing to predict:
    # it is only read.
    bare = (pieces[:, 0] == pieces[:, 1]) & (trained[pieces[:, 2]] == trained[pieces[:, 0]])
    pieces[bare, 1] = pieces[bare, 2]
    without = np.flatnonzero(pieces[:, 0] == pieces[:, 1])
    if len(without):
        begin, _, end = pieces[without[0]]
        raise ConfigError(
            f"document {without[0]} of the row ({end - begin} tokens, {len(without)} of "
            f"{len(pieces)} such) has no prefix, so there is nothing for an encoder to read; "
            "give every source a Denoise objective with bidirectional=True and no causal "
            "task, and the loader InputRequirements(prefix=True)"
        )
    if row.loss_weights is None:
        return pieces, targets, (targets != IGNORE).astype(np.float32)
    return pieces, targets, row.loss_weights[0, : row.num_tokens]


def _refuse_lost_targets(targets: Array, predicts: Array, document_ids: Array) -> None:
    lost = np.flatnonzero(~predicts & (targets != IGNORE))
    if len(lost):
        raise ConfigError(
            f"document {document_ids[lost[0]]} of the row has targets inside its prefix (slot "
            f"{lost[0]}), and an encoder predicts nothing: they would be lost; an objective "
            "must give tokens of its prefix the weight 0"
        )


def _refuse_too_short(encoder: _Side, decoder: _Side) -> None:
    reads, predicts = len(encoder.slots), len(decoder.slots)
    padded = predicts < decoder.length
    if reads + padded > encoder.length or predicts > decoder.length:
        raise ConfigError(
            f"a row needs {reads} encoder slots{' and one for padding' if padded else ''}, "
            f"and {predicts} decoder slots; there are encoder_length={encoder.length} and "
            f"decoder_length={decoder.length}; sequence_length + 1 and sequence_length are "
            "always enough"
        )
