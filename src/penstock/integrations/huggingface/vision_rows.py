"""Loss weights of rendered text, carried over to the tokens that a multimodal processor made of it.

A processor replaces the placeholder of an image by many tokens, and encodes the text around it again. So both sides are
spelled as bytes, and cut at their media tokens: each stretch of text between two placeholders must stand in the
processor's row, byte for byte and in order. A token there has the weight of the last byte that it spells; what the
processor put in place of a placeholder has weight 0. Nothing is guessed: a row that spells other text is an error.
Costs: one pass over the bytes of a row, about 10 µs a thousand tokens.
"""

from typing import Any, final

import numpy as np

from penstock.errors import ConfigError, RecordError, TokenizerError
from penstock.tokenizers import ByteTable, Tokenizer

Ids = np.ndarray[Any, np.dtype[np.int64]]
Weights = np.ndarray[Any, np.dtype[np.float32]]


@final
class RowWeigher:
    """Carries weights over for one tokenizer.

    Args:
        tokenizer: What encodes the text on both sides.
        media_ids: Ids of placeholders, and of what processors put in their place.

    Raises:
        ConfigError: Nothing is known of the bytes of its tokens.
    """

    def __init__(self, tokenizer: Tokenizer, media_ids: tuple[int, ...]) -> None:
        try:
            table = tokenizer.byte_table
        except TokenizerError as error:
            raise ConfigError(
                f"{error}; so the processor's rows cannot be held against its template's text: give role boundaries"
            ) from error
        names = {token_id: text.encode() for text, token_id in tokenizer.special_tokens.items()}
        size = max(len(table), 1 + max(names, default=0))
        self._table = ByteTable(names.get(i) or (table[i] if i < len(table) else b"") for i in range(size))
        self._is_control = np.isin(np.arange(size), list(names))
        self._media = np.array(media_ids, np.int64)

    def weigh(self, ids: Ids, text_ids: Ids, text_weights: Weights, where: str) -> Weights:
        """Weights of a processor's row.

        Args:
            ids: Its tokens without padding, [tokens].
            text_ids: The rendered text with its placeholders, encoded, [text tokens].
            text_weights: [text tokens].
            where: Which row it is, for errors.

        Returns:
            float32 [tokens].

        Raises:
            RecordError: The row spells other text, or has control tokens where the text has none, or the reverse.
        """
        spelled, ends = self._spell(ids)
        lengths, is_media = np.diff(ends, prepend=0), np.isin(ids, self._media)
        placed = self._place(spelled.tobytes(), ends[is_media], text_ids, where)
        weights, inside = np.zeros(len(spelled), np.float32), np.zeros(len(spelled), np.bool_)
        is_control = np.repeat(self._is_control[ids], lengths)
        due = is_control.copy()
        for place, first, last in placed:
            sizes = self._table.lengths[text_ids[first:last]]
            stretch = slice(place, place + int(sizes.sum()))
            weights[stretch], inside[stretch] = np.repeat(text_weights[first:last], sizes), True
            due[stretch] = np.repeat(self._is_control[text_ids[first:last]], sizes)
        self._check_control(ids, ends, is_control, due, where)
        (begin, *_), (end, first, last) = placed[0], placed[-1]
        end += int(self._table.lengths[text_ids[first:last]].sum())
        other = ~(is_control | np.repeat(is_media, lengths))
        if other[:begin].any() or other[end:].any():
            raise RecordError(self._differs(where, self._spell(text_ids)[0], 0))
        lasts = np.maximum(ends - 1, 0)
        counts = (lengths > 0) & ~is_media
        found: Weights = np.where(counts & inside[lasts], weights[lasts], 0).astype(np.float32)
        return found

    def _place(self, whole: bytes, media_ends: Ids, text_ids: Ids, where: str) -> list[tuple[int, int, int]]:
        """Where each stretch of text between placeholders stands: (byte, first text token, one after the last)."""
        cuts = np.flatnonzero(np.isin(text_ids, self._media)).tolist()
        placed, at = [], 0
        for number, (first, last) in enumerate(
            zip([0, *(cut + 1 for cut in cuts)], [*cuts, len(text_ids)], strict=True)
        ):
            text = self._spell(text_ids[first:last])[0].tobytes()
            if number:  # in place of the placeholder before it there is at least one media token
                behind = np.searchsorted(media_ends, at, "right")
                at = int(media_ends[behind]) if behind < len(media_ends) else len(whole) + 1
            # The last stretch is looked for from the end, as nothing but control tokens is behind it.
            place = whole.rfind(text, at) if last == len(text_ids) else whole.find(text, at)
            if place < 0:
                raise RecordError(self._differs(where, text, number))
            placed.append((place, first, last))
            at = place + len(text)
        return placed

    def _spell(self, ids: Ids) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], Ids]:
        """Bytes of tokens, control tokens by their names, and one after the last byte of each."""
        return self._table.spell(ids), np.cumsum(self._table.lengths[ids])

    def _check_control(self, ids: Ids, ends: Ids, found: Any, due: Any, where: str) -> None:
        """Refuse a row that has control tokens where the text has none, or the reverse; both bool [bytes]."""
        wrong = np.flatnonzero(found != due)
        if not len(wrong):
            return
        token = int(np.searchsorted(ends, wrong[0], "right"))
        text = bytes(self._spell(ids[token : token + 8])[0]).decode(errors="replace")
        made, expected = ("a control token", "text") if found[wrong[0]] else ("text", "a control token")
        raise RecordError(
            f"{where}: the processor made {made} where {expected} is expected, at {text!r}; take the control text "
            "out of the message, or choose another trained_control_text"
        )

    @staticmethod
    def _differs(where: str, text: Any, number: int) -> str:
        shown = bytes(text[:80]).decode(errors="replace")
        after = f" behind image, video or audio {number}" if number else ""
        return (
            f"{where}: the processor's tokens do not spell what its template writes{after}: {shown!r} is expected; "
            "give role boundaries, by which rows are labelled without the text: VisionCollator(processor, boundaries)"
        )
