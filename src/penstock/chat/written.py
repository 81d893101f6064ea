"""Documents that records write out: segments of text and token ids, encoded without a template.

Each segment is encoded by itself, as axolotl does, so that no token spans two of them; control text
in it becomes control tokens, because whoever writes segments writes the markers.
"""

import numpy as np

from penstock.chat.encoded_chat import EncodedChat, IntArray
from penstock.chat.masks.certificate import Certificate, Problem
from penstock.chat.masks.checks import check_unread
from penstock.chat.records.conversation import Conversation, Piece
from penstock.chat.tokens.encoding import encode_rendered
from penstock.core.arrays import Float32, UInt32
from penstock.core.errors import ConversationError
from penstock.tokenizers import Tokenizer

Part = tuple[str, UInt32, IntArray, IntArray]
"""Text, ids, and the first character of each token and one after its last."""


def encode_written(
    conversation: Conversation, tokenizer: Tokenizer, unread: tuple[str, ...] = ()
) -> EncodedChat:
    """A document that a record writes out, as it is.

    Raises:
        ConversationError: An id is not in the vocabulary.
        TokenizerError: A text cannot be encoded.
    """
    parts: list[Part] = []
    weights: list[Float32] = []
    for piece in conversation.written:
        part = (
            _of_text(piece.text, tokenizer)
            if piece.text is not None
            else _of_ids(piece, tokenizer, conversation)
        )
        parts.append(part)
        given = np.asarray(piece.weights, np.float32)
        weights.append(np.broadcast_to(given, len(part[1])) if len(given) == 1 else given)
    starts = np.cumsum([0, *(len(part[0]) for part in parts)])
    tokens = np.concatenate([part[1] for part in parts])
    own = np.concatenate(weights)
    is_trained = bool((own[1:] != 0).any())
    untrained = (
        []
        if is_trained
        else [Problem("nothing_trained", -1, "no token is trained: the record says so")]
    )
    control = np.isin(tokens, np.array(list(tokenizer.special_tokens.values()), np.uint32))
    return EncodedChat(
        tokens=tokens,
        loss_weights=own,
        text="".join(part[0] for part in parts),
        begins=np.concatenate(
            [part[2] + start for part, start in zip(parts, starts, strict=False)]
        ),
        ends=np.concatenate([part[3] + start for part, start in zip(parts, starts, strict=False)]),
        is_control=control,
        messages=np.full(len(tokens), -1, np.int64),
        roles=(),
        certificate=Certificate(
            terminators=(),
            dropped=(),
            straddling=(),
            forged=(),
            checks=(),
            problems=(*untrained, *check_unread(unread)),
            unread=unread,
        ),
    )


def _of_text(text: str, tokenizer: Tokenizer) -> Part:
    encoded = encode_rendered(tokenizer, text, np.ones(len(text), np.bool_))
    return text, encoded.ids, encoded.begins, encoded.ends


def _of_ids(piece: Piece, tokenizer: Tokenizer, conversation: Conversation) -> Part:
    ids = np.array(piece.ids, np.uint32)
    if len(ids) and ids.max() >= tokenizer.vocab_size:
        raise ConversationError(
            f"{conversation.origin or 'record'}: input_ids has {ids.max()}; the vocabulary of "
            f"{tokenizer.name} has {tokenizer.vocab_size:,} ids; were they made with another "
            "tokenizer?"
        )
    # A character of several tokens belongs to the last of them.
    whole = tokenizer.decode(ids)
    texts = [tokenizer.decode([token]) for token in piece.ids]
    if "".join(texts) != whole:
        return whole, ids, *_places(tokenizer, ids, whole)
    ends = np.cumsum([len(text) for text in texts]).astype(np.int64)
    return whole, ids, np.concatenate([[0], ends[:-1]]).astype(np.int64), ends


def _places(tokenizer: Tokenizer, ids: UInt32, whole: str) -> tuple[IntArray, IntArray]:
    """Characters of tokens whose texts do not add up, from the texts of their beginnings, token by
    token.
    """
    ends, text, begin = [], "", 0
    for at in range(len(ids)):
        shown = tokenizer.decode(ids[begin : at + 1])
        if not shown.endswith("\ufffd"):
            text, begin = text + shown, at + 1
        ends.append(min(len(text) + (0 if begin == at + 1 else len(shown)), len(whole)))
    found = np.array(ends, np.int64)
    return np.concatenate([[0], found[:-1]]).astype(np.int64), found
