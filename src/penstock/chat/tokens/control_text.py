"""The control text of a tokenizer as a trie, which finds it in texts; built once per tokenizer.

Building takes about 1 ms per hundred entries. A trie needs 1 KB per state, so about 10 MB for the
largest vocabularies (Gemma 3: 6,400 added entries).
"""

from collections.abc import Sequence
from typing import final
from weakref import WeakKeyDictionary

import numpy as np

from penstock.core.arrays import Int32
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.vocabulary import AddedEntry

_BUILT: "WeakKeyDictionary[Tokenizer, ControlText | None]" = WeakKeyDictionary()


@final
class ControlText:
    """Entries at which a tokenizer cuts text, as arrays for the kernels.

    Attributes:
        entries: The entries, in the order of the arrays below.
        steps: Next state by state and byte, int32 [states, 256]; 0: no entry continues with that
            byte.
        accepts: The entry that ends in a state, or -1, int32 [states].
        ids: Id of each entry, uint32 [entries]; `is_control`, `lstrip`, `rstrip`: bool [entries].
        is_control_id: Ids that text must never become, bool [vocab].
    """

    __slots__ = (
        "accepts",
        "entries",
        "ids",
        "is_control",
        "is_control_id",
        "lstrip",
        "rstrip",
        "steps",
    )

    def __init__(
        self, entries: Sequence[AddedEntry], vocab_size: int, unknown_id: int | None = None
    ) -> None:
        self.entries = [entry for entry in entries if entry.text]
        self.ids = np.array([entry.token_id for entry in self.entries], np.uint32)
        self.is_control = np.array([entry.is_control for entry in self.entries], np.bool_)
        self.lstrip = np.array([entry.lstrip for entry in self.entries], np.bool_)
        self.rstrip = np.array([entry.rstrip for entry in self.entries], np.bool_)
        self.is_control_id = np.zeros(vocab_size, np.bool_)
        self.is_control_id[self.ids[self.is_control]] = True
        if unknown_id is not None:
            self.is_control_id[unknown_id] = (
                False  # stands for text that the vocabulary cannot spell
            )
        self.steps, self.accepts = _build_trie([entry.text.encode() for entry in self.entries])


def control_text(tokenizer: Tokenizer) -> ControlText | None:
    """The control text of `tokenizer`, built once; None if the tokenizer does not simply cut texts
    at its entries.
    """
    if tokenizer not in _BUILT:
        cuts, size = tokenizer.cuts, tokenizer.vocab_size
        _BUILT[tokenizer] = None if cuts is None else ControlText(cuts, size, tokenizer.unknown_id)
    return _BUILT[tokenizer]


def _build_trie(
    words: Sequence[bytes],
) -> tuple[Int32, Int32]:
    """Next state by state and byte, and the word that ends in each state; state 0 is the root."""
    branches: list[dict[int, int]] = [{}]
    accepted: dict[int, int] = {}
    for number, word in enumerate(words):
        state = 0
        for byte in word:
            if byte not in branches[state]:
                branches[state][byte] = len(branches)
                branches.append({})
            state = branches[state][byte]
        accepted[state] = number
    steps = np.zeros((len(branches), 256), np.int32)
    accepts = np.full(len(branches), -1, np.int32)
    for state, branch in enumerate(branches):
        for byte, following in branch.items():
            steps[state, byte] = following
    for state, number in accepted.items():
        accepts[state] = number
    return steps, accepts
