"""Fill-in-the-middle: a document is cut in three, and its middle moved to the end, to be predicted
from both sides.

Guarantees: only the order of a document changes; all draws depend on the document's key alone;
lengths follow from (length, key), in constant time. Documents are split to fit a row *before* they
are infilled (`document_limit`), so each one is whole in its row, never a prefix without its middle:
what the paper calls context-level infilling. (Megatron-LM and its descendants infill first and then
cut off the end of the suffix.)

Costs: token splits are compiled and cost a copy of the tokens; character splits are Python, 0.1 to
0.2 ms per document.

Source: Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle",
arXiv:2207.14255.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, final

import numpy as np

from penstock.core.arrays import Float32, Int32, Int64, UInt64
from penstock.core.compiled import from_python
from penstock.core.errors import ConfigError, TokenizerError
from penstock.core.suggestions import suggests
from penstock.plan.objectives import _infill_kernels as kernels
from penstock.plan.objectives._infill_kernels import CAUSAL, INFILL, PSM, measure_each
from penstock.plan.objectives.character_splits import CharacterSplitter, Section
from penstock.plan.objectives.control_tokens import infill_ids, refuse_same, tokenizer_of
from penstock.plan.objectives.objective import Facts, Written
from penstock.tokenizers import Tokenizer

_decide_infill, _write_infill = (
    from_python(kernels.decide_infill),
    from_python(kernels.write_infill),
)
_places_of = from_python(kernels.places_of)

ORDERS = ("causal", "PSM", "SPM")
"""Names that `task` returns, by the kernels' numbers."""


@suggests
@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """Fill-in-the-middle. An infilled document takes three slots more than it has tokens, plus
    `room`.

    PSM is `<prefix> prefix <suffix> suffix <middle> middle`; SPM is `<prefix> <suffix> suffix
    <middle> prefix middle`, the paper's variant that shares prefix and middle tokens with PSM, as
    SantaCoder, StarCoder and Megatron-LM train it. The two split points are drawn independently,
    each uniform over the length + 1 gaps, both ends included, then sorted, as those do: sections
    may be empty, and a pair of different points is twice as likely as a pair of equal ones. Rates
    are multiples of 2^-32.

    An infilling token gets the largest weight of the tokens between it and the next infilling
    token; if there are none, the largest weight of the document.
    """

    rate: float = 0.5
    """The share of the documents that are infilled; the others stay as they are."""
    spm_rate: float = 0.5
    """The share of SPM among the infilled ones; the others are PSM."""
    split: Literal["token", "character"] = "token"
    """Where documents may be cut: between tokens, or between characters, as at a user's cursor;
    then the text around the cut is encoded again.
    """
    tokens: Sequence[int | str] | None = None
    """Prefix, middle, suffix and, for character splits, padding token, as ids or names; by default
    those of the first known family that the tokenizer has.
    """
    train_on_context: bool = True
    """Whether prefix and suffix are targets too, as in the paper; False: only the middle is."""
    room: int = 8
    """Character splits: slots reserved for the extra tokens of a cut; unused ones hold padding at
    the end of the document. A cut that needs more moves to the border of its token.
    """
    tokenizer: str | None = dataclasses.field(default=None, repr=False)
    """A tokenizer with more control entries than the dataset's, in which names are looked up; see
    `penstock tokenizer add`. None: the dataset's. It is not in the repr, and so not in states: the
    ids found count, not the path.
    """
    splitter: CharacterSplitter | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )
    """Cuts at characters; made by `resolve`."""

    def __post_init__(self) -> None:
        for name in ("rate", "spm_rate"):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
                raise ConfigError(f"infill: {name} must be a share from 0 to 1, got {value!r}")
            object.__setattr__(self, name, float(value))
        if self.split not in ("token", "character"):
            raise ConfigError(f"infill: split must be token or character, got {self.split!r}")
        room: Any = self.room
        if isinstance(room, bool) or not isinstance(room, Integral) or not 0 <= int(room) <= 64:
            raise ConfigError(f"infill: room must be a number of slots from 0 to 64, got {room!r}")
        object.__setattr__(self, "room", int(room))
        if self.tokens is not None:
            object.__setattr__(self, "tokens", _checked_tokens(self.tokens))

    @property
    def name(self) -> str:
        """infill"""
        return "infill"

    @property
    def bidirectional(self) -> bool:
        """False: attention is causal, which loses nothing, since the middle comes after all its
        context.
        """
        return False

    def resolve(self, facts: Facts) -> "Infill":
        """Look the tokens up, and refuse what cannot work.

        Raises:
            ConfigError: The tokenizer lacks a token or cannot be cut at characters, or rows are too
                short.
        """
        where = f"{facts.where}: infill"
        if self.document_limit(facts.sequence_length) < 1:
            raise ConfigError(
                f"{where}: rows of {facts.sequence_length} slots leave none for a document "
                f"and {self._extra} for infilling; give a longer sequence_length"
            )
        if (
            self.split == "token"
            and self.tokens is not None
            and all(isinstance(token, int) for token in self.tokens)
        ):
            return self
        tokenizer = tokenizer_of(facts, self.tokenizer, where)
        splitter = _splitter_of(tokenizer, where) if self.split == "character" else None
        ids = infill_ids(self.tokens, tokenizer, pad=splitter is not None, where=where)
        resolved = dataclasses.replace(self, tokens=ids)
        object.__setattr__(resolved, "splitter", splitter)
        return resolved

    def document_limit(self, sequence_length: int) -> int:
        """The longest document, in tokens, that fits a row for every key."""
        return sequence_length - (self._extra if self.rate else 0)

    def measure(
        self, lengths: Annotated[Int64, "documents"], keys: Annotated[UInt64, "documents"]
    ) -> Annotated[Int64, "documents"]:
        """Slots: the length, plus 3 and `room` for an infilled document."""
        slots = np.empty(len(lengths), np.int64)
        measure_each(
            self._program(), np.asarray(lengths, np.int64), np.asarray(keys, np.uint64), slots
        )
        return slots

    def program(self) -> Annotated[Int64, "numbers"] | None:
        """The program of the compiled writer, after `resolve`; None for character splits, which
        `write` handles.
        """
        return self._program() if self.split == "token" else None

    @property
    def task_names(self) -> tuple[str, ...]:
        """All names that `task` may return."""
        return ORDERS

    @property
    def added_tokens(self) -> tuple[int, ...]:
        """Ids that it inserts into documents, as far as they are known."""
        return tuple(token for token in self.tokens or () if isinstance(token, int))

    def task(self, length: int, key: int) -> str:
        """ "PSM", "SPM" or "causal"."""
        return ORDERS[_decide_infill(self._program(), length, np.uint64(key))[0]]

    def write(
        self,
        tokens: Annotated[Int32, "length"],
        weights: Annotated[Float32, "length"] | None,
        key: int,
    ) -> Written:
        """Rewrite one document; see the class. A ConfigError if the numbers of weights and tokens
        differ.
        """
        if weights is not None and len(weights) != len(tokens):
            raise ConfigError(
                f"infill: a document of {len(tokens)} tokens has {len(weights)} weights; "
                "expected one each"
            )
        program, tokens = self._program(), np.ascontiguousarray(tokens, np.int32)
        order = _decide_infill(program, len(tokens), np.uint64(key))[0]
        if order == CAUSAL:
            return Written(tokens=tokens, weights=weights)
        self._ids()
        given = (
            np.ones(len(tokens), np.float32)
            if weights is None
            else np.ascontiguousarray(weights, np.float32)
        )
        if self.split == "character":
            return self._write_at_characters(tokens, given, key)
        out_tokens, out_weights = (
            np.empty(len(tokens) + 3, np.int32),
            np.empty(len(tokens) + 3, np.float32),
        )
        _write_infill(program, tokens, given, np.uint64(key), out_tokens, out_weights)
        plain = weights is None and self.train_on_context
        return Written(tokens=out_tokens, weights=None if plain else out_weights)

    def restore(
        self, written: Annotated[Int32, "slots"], length: int, key: int
    ) -> Annotated[Int32, "tokens"]:
        """Restore the document from its written form: its ids, or for a character split ids that
        spell the same text.

        Character splits are found by the infilling tokens, so a document that holds these tokens
        itself, or ends with padding, is not restored.
        """
        order, first, second = _decide_infill(self._program(), length, np.uint64(key))
        if order == CAUSAL:
            return written
        if self.split == "character":
            _, middle_id, suffix_id, pad = self._ids()
            kept = len(written) - int(np.argmax(written[::-1] != pad))
            suffix, middle = (int(np.argmax(written == token)) for token in (suffix_id, middle_id))
            return np.concatenate(
                [written[1:suffix], written[middle + 1 : kept], written[suffix + 1 : middle]]
            )
        prefix, suffix, middle = _places_of(order, length, first, second)
        sections = [(prefix, first), (middle, second - first), (suffix, length - second)]
        return np.concatenate([written[begin : begin + size] for begin, size in sections])

    def _write_at_characters(self, tokens: Int32, weights: Float32, key: int) -> Written:
        if self.splitter is None:
            raise ConfigError(
                "infill: character splits need the tokenizer; call resolve(facts) first"
            )
        units = self.splitter.count(tokens)
        order, first, second = _decide_infill(self._program(), units, np.uint64(key))
        prefix, middle, suffix = self.splitter.split(tokens, weights, first, second, self.room)
        whole = weights.max()
        prefix_id, middle_id, suffix_id, pad = self._ids()
        nothing = Section.joined(())
        opened = (
            (prefix, suffix, middle)
            if order == PSM
            else (nothing, suffix, Section.joined([prefix, middle]))
        )
        parts = []
        for token, section in zip((prefix_id, suffix_id, middle_id), opened, strict=True):
            parts.append(
                Section.of(token, section.weights.max(initial=0) if len(section.ids) else whole)
            )
            parts.append(section)
        written = Section.joined(parts)
        if not self.train_on_context:
            written.weights[: len(written.ids) - len(middle.ids)] = 0
        filling = len(tokens) + self._extra - len(written.ids)
        padded = np.concatenate([written.ids, np.full(filling, pad, np.int32)])
        weighed = np.concatenate([written.weights, np.zeros(filling, np.float32)])
        return Written(tokens=padded, weights=weighed, padding=filling)

    @property
    def _extra(self) -> int:
        return 3 + (self.room if self.split == "character" else 0)

    def _ids(self) -> tuple[int, ...]:
        if self.tokens is None or any(isinstance(token, str) for token in self.tokens):
            raise ConfigError(
                "infill: the ids of its tokens are not known yet; call resolve(facts), or give ids"
            )
        return tuple(int(token) for token in self.tokens)

    def _program(self) -> Int64:
        """See `_infill_kernels`; unknown ids are -1, which measuring ignores."""
        known = [token if isinstance(token, int) else -1 for token in self.tokens or (-1, -1, -1)]
        prefix, middle, suffix = known[:3]
        rates = [round(rate * 2**32) for rate in (self.rate, self.spm_rate)]
        numbers = [
            INFILL,
            *rates,
            prefix,
            suffix,
            middle,
            int(self.train_on_context),
            self._extra - 3,
        ]
        return np.array(numbers, np.int64)


def _splitter_of(tokenizer: Tokenizer, where: str) -> CharacterSplitter:
    try:
        return CharacterSplitter(tokenizer)
    except TokenizerError as error:
        raise ConfigError(
            f"{where}: documents of {tokenizer.name} cannot be cut at characters: {error}; "
            "use split='token'"
        ) from error


def _checked_tokens(tokens: Any) -> tuple[int | str, ...]:
    listed = tuple(tokens) if not isinstance(tokens, str) else ()
    fine = all(
        isinstance(token, str) or (isinstance(token, Integral) and int(token) >= 0)
        for token in listed
    )
    if len(listed) not in (3, 4) or not fine:
        raise ConfigError(
            "infill: tokens must be prefix, middle, suffix and, for character splits, "
            f"padding, as ids or names; got {tokens!r}"
        )
    checked = tuple(token if isinstance(token, str) else int(token) for token in listed)
    refuse_same(checked, "infill")
    return checked
