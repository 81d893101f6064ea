"""Reads the examples of a multimodal batch, and transfers loss weights to the tokens of a
processor.

Examples become conversations with their media where processors look for them: in parts of the
messages. The processor says which tokens stand for media, and its tokenizer becomes one of
penstock's.

A processor replaces the placeholder of an image by many tokens, and encodes the text around it
again. So the rendered text and the processor's row are both spelled as bytes and cut at their media
tokens: each stretch of text between two placeholders must occur in the row, byte for byte and in
order. A token in it gets the weight of the last byte that it spells; what replaces a placeholder
gets weight 0. A row that spells other text is an error. Cost: one pass over the bytes of a row,
about 10 µs per thousand tokens.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np

from penstock.chat.masks.families import token_id
from penstock.chat.records.conversation import DEFAULT_WEIGHTS, Conversation
from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.layouts import read_conversation
from penstock.chat.records.tools import read_tools
from penstock.core.arrays import Bytes, Float32, Int64
from penstock.core.errors import ConfigError, RecordError, TokenizerError
from penstock.media.records import media_fields
from penstock.tokenizers import ByteTable, Tokenizer

Ids = Int64
Weights = Float32

_log = logging.getLogger("penstock.huggingface")
_MEDIA = r"(?:.*_)?(?:image|img|video|audio|boi|eoi|boa|eoa)(?:_.*)?"
_TOKEN = re.compile(rf"{_MEDIA}_token")
"""Names of attributes that hold the text of a media token. Numbers there are something else
(audio_ms_per_token).
"""
_IDS = re.compile(rf"{_MEDIA}_token_ids?|image_ids")
"""Names of attributes that hold ids of media tokens."""
_LAYOUT = LayoutSettings(join_text_parts=False)


def media_ids(processor: Any) -> tuple[int, ...]:
    """Ids of the image, audio and video tokens that a processor declares, without the unknown
    token.
    """
    tokenizer, found = processor.tokenizer, set()
    for holder in (processor, tokenizer):
        for name, value in vars(holder).items():
            entries = value if isinstance(value, (list, tuple, set)) else [value]
            if _TOKEN.fullmatch(name):
                found |= {token_id(entry, tokenizer) for entry in entries if isinstance(entry, str)}
            elif _IDS.fullmatch(name):
                found |= {
                    entry
                    for entry in entries
                    if isinstance(entry, int) and not isinstance(entry, bool)
                }
    unknown = getattr(tokenizer, "unk_token_id", None)
    return tuple(sorted(entry for entry in found if entry is not None and entry != unknown))


def own_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer of transformers as a penstock one, which finds more forms of a marker; unchanged
    if that fails.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer
    content = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    names = {
        name: str(text)
        for name, text in tokenizer.special_tokens_map.items()
        if isinstance(text, str)
    }
    files = {
        "tokenizer.json": json.dumps(content).encode(),
        "tokenizer_config.json": json.dumps(names).encode(),
    }
    try:
        return Tokenizer(type(tokenizer).__name__, files)
    except TokenizerError as error:
        _log.info("markers are encoded by the tokenizer of transformers: %s", error)
        return tokenizer


def read_example(example: object, where: str, tools: object = None) -> Conversation:
    """The conversation of an example.

    Args:
        example: A record, or a list of messages.
        where: Which row it is, for errors.
        tools: Tools of a record without its own.

    Raises:
        RecordError: It cannot be read.
    """
    record = example if isinstance(example, Mapping) else {"messages": example}
    if not record:
        raise RecordError(
            f"{where} has no fields: the Trainer of transformers removes columns that the "
            "model's forward does not name; set "
            "TrainingArguments(remove_unused_columns=False)"
        )
    read = read_conversation(record, _LAYOUT, where)
    if isinstance(read, list):
        raise RecordError(f"{where} holds {len(read)} conversations; expected: one")
    return replace(read, tools=read_tools(tools, where)) if read.tools is None else read


def refuse_fields(conversations: Sequence[Conversation]) -> None:
    """Refuse media outside the contents of messages, where a processor would not find them."""
    for read in conversations:
        misplaced = {"the record": read.attachments} | {
            f"message {number}": media_fields(message)
            for number, message in enumerate(read.messages)
        }
        for holder, fields in misplaced.items():
            if fields:
                raise RecordError(
                    f'{read.origin}: {holder} has media in its field "{next(iter(fields))}"; '
                    'expected: media as parts of a content, {"type": "image", "image": …}, '
                    "where the processor finds them"
                )


def refuse_message_weights(conversations: Sequence[Conversation]) -> None:
    """Refuse messages that say themselves how they are trained."""
    for conversation in conversations:
        for number, weights in enumerate(conversation.message_weights):
            if weights != DEFAULT_WEIGHTS:
                raise RecordError(
                    f"{conversation.origin}, message {number}: it says itself how it is "
                    "trained (train, weight or ranges), which role boundaries do not "
                    "support; leave boundaries out"
                )


def shared_variables(conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Tools and template variables of the conversations; a processor takes one set for a whole
    batch.
    """
    own: list[dict[str, Any]] = [
        {
            **conversation.variables,
            **({"tools": list(conversation.tools)} if conversation.tools else {}),
        }
        for conversation in conversations
    ]
    different = next((row for row, one in enumerate(own) if one != own[0]), None)
    if different is not None:
        raise RecordError(
            f"row {different} of the batch has other tools or chat_template_kwargs than row "
            "0, but a processor takes one set per batch; batch similar examples, or give "
            "template_arguments"
        )
    return own[0] if own else {}


@final
class RowWeigher:
    """Transfers loss weights from rendered text to a processor's rows.

    Args:
        tokenizer: Encodes the text on both sides.
        media_ids: Ids of placeholders, and of what processors put in their place.

    Raises:
        ConfigError: The bytes of the tokenizer's tokens are unknown.
    """

    def __init__(self, tokenizer: Tokenizer, media_ids: tuple[int, ...]) -> None:
        try:
            table = tokenizer.byte_table
        except TokenizerError as error:
            raise ConfigError(
                f"{error}; so the processor's rows cannot be compared with its template's "
                "text: give role boundaries"
            ) from error
        names = {token_id: text.encode() for text, token_id in tokenizer.special_tokens.items()}
        size = max(len(table), 1 + max(names, default=0))
        self._table = ByteTable(
            names.get(i) or (table[i] if i < len(table) else b"") for i in range(size)
        )
        self._is_control = np.isin(np.arange(size), list(names))
        self._media = np.array(media_ids, np.int64)

    def weigh(self, ids: Ids, text_ids: Ids, text_weights: Weights, where: str) -> Weights:
        """Weights of a processor's row.

        Args:
            ids: The row's tokens without padding, [tokens].
            text_ids: The rendered text with its placeholders, encoded, [text tokens].
            text_weights: [text tokens].
            where: Which row it is, for errors.

        Returns:
            float32 [tokens].

        Raises:
            RecordError: The row spells other text, or has control tokens where the text has none,
                or the reverse.
        """
        spelled, ends = self._spell(ids)
        lengths, is_media = np.diff(ends, prepend=0), np.isin(ids, self._media)
        placed = self._place(spelled.tobytes(), ends[is_media], text_ids, where)
        weights, inside = np.zeros(len(spelled), np.float32), np.zeros(len(spelled), np.bool_)
        is_control = np.repeat(self._is_control[ids], lengths)
        expected = is_control.copy()
        for place, first, last in placed:
            sizes = self._table.lengths[text_ids[first:last]]
            stretch = slice(place, place + int(sizes.sum()))
            weights[stretch], inside[stretch] = np.repeat(text_weights[first:last], sizes), True
            expected[stretch] = np.repeat(self._is_control[text_ids[first:last]], sizes)
        self._check_control(ids, ends, is_control, expected, where)
        (begin, *_), (end, first, last) = placed[0], placed[-1]
        end += int(self._table.lengths[text_ids[first:last]].sum())
        other = ~(is_control | np.repeat(is_media, lengths))
        if other[:begin].any() or other[end:].any():
            raise RecordError(self._differs(where, self._spell(text_ids)[0], 0))
        lasts = np.maximum(ends - 1, 0)
        counts = (lengths > 0) & ~is_media
        found: Weights = np.where(counts & inside[lasts], weights[lasts], 0).astype(np.float32)
        return found

    def _place(
        self, whole: bytes, media_ends: Ids, text_ids: Ids, where: str
    ) -> list[tuple[int, int, int]]:
        """Where each stretch of text between placeholders begins: (byte, first text token, one
        after the last).
        """
        cuts = np.flatnonzero(np.isin(text_ids, self._media)).tolist()
        placed, at = [], 0
        for number, (first, last) in enumerate(
            zip([0, *(cut + 1 for cut in cuts)], [*cuts, len(text_ids)], strict=True)
        ):
            text = self._spell(text_ids[first:last])[0].tobytes()
            if number:  # at least one media token replaces the placeholder before it
                behind = np.searchsorted(media_ends, at, "right")
                at = int(media_ends[behind]) if behind < len(media_ends) else len(whole) + 1
            # The last stretch is searched from the end, because only control tokens follow it.
            place = whole.rfind(text, at) if last == len(text_ids) else whole.find(text, at)
            if place < 0:
                raise RecordError(self._differs(where, text, number))
            placed.append((place, first, last))
            at = place + len(text)
        return placed

    def _spell(self, ids: Ids) -> tuple[Bytes, Ids]:
        """Bytes of tokens (of control tokens: their names), and one after the last byte of each."""
        return self._table.spell(ids), np.cumsum(self._table.lengths[ids])

    def _check_control(self, ids: Ids, ends: Ids, found: Any, expected: object, where: str) -> None:
        """Refuse a row that has control tokens where the text has none, or the reverse; both bool
        [bytes].
        """
        wrong = np.flatnonzero(found != expected)
        if not len(wrong):
            return
        token = int(np.searchsorted(ends, wrong[0], "right"))
        text = bytes(self._spell(ids[token : token + 8])[0]).decode(errors="replace")
        made, wanted = (
            ("a control token", "text") if found[wrong[0]] else ("text", "a control token")
        )
        raise RecordError(
            f"{where}: the processor made {made} where {wanted} is expected, at {text!r}; "
            "remove the control text from the message, or choose another trained_control_text"
        )

    @staticmethod
    def _differs(where: str, text: Any, number: int) -> str:
        shown = bytes(text[:80]).decode(errors="replace")
        after = f" after image, video or audio {number}" if number else ""
        return (
            f"{where}: the processor's tokens do not spell what its template writes{after}: "
            f"{shown!r} is expected; label by role boundaries, which do not need the text: "
            "VisionCollator(processor, boundaries)"
        )
