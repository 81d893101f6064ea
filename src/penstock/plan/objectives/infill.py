"""Fill-in-the-middle: a document is cut in three, and its middle moved to the end, to be predicted
from both sides.

Guarantees: only the order of a document changes; all draws depend on the document's key alone;
lengths follow from (length, key), in constant time. Documents are split to fit a row *before* they
are infilled (`document_limit`), so each one is whole in its row, never a prefix without its middle:
what the paper calls context-level infilling. (Megatron-LM and its descendants infill first and then
cut off the end of the suffix.)

With a `separator`, each fragment of a document is infilled by itself; see `fragments`.

Costs: token splits are compiled and cost a copy of the tokens; with `separator` or `ignore_prefix`
some Python for each document, too; character splits are Python, 0.1 to 0.2 ms per document.

Source: Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle",
arXiv:2207.14255.
"""

import dataclasses
from bisect import bisect_right
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
from penstock.plan.objectives._infill_kernels import CAUSAL, INFILL, measure_each
from penstock.plan.objectives.character_splits import CharacterSplitter
from penstock.plan.objectives.control_tokens import infill_ids, refuse_same, tokenizer_of
from penstock.plan.objectives.fragments import (
    Fragments,
    Starts,
    WrittenFragment,
    read_fragments,
    refuse_separator,
    separator_id,
    starts_of,
)
from penstock.plan.objectives.objective import Facts, Written
from penstock.tokenizers import Tokenizer

_decide_infill, _write_infill = (
    from_python(kernels.decide_infill),
    from_python(kernels.write_infill),
)
_places_of, _slots_reserved = from_python(kernels.places_of), from_python(kernels.reserved)

ORDERS = ("causal", "PSM", "SPM")
"""Names that `task` returns, by the kernels' numbers."""


_LATER = ("max_middle", "separator", "fragment_rate", "fragment_tokens", "ignore_prefix")
"""Settings that the first release did not have."""
FRAGMENT_TASKS = ("causal", "infilled")
"""Names that `task` returns where each fragment has an order of its own."""


@suggests
@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Infill:
    """Fill-in-the-middle. An infilled document takes three slots more than it has tokens, plus
    `room`; with a `separator`, as many for each fragment that it has slots for.

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
    """Prefix, middle, suffix and, for character splits and fragments, padding token, as ids or
    names; by default those of the first known family that the tokenizer has.
    """
    train_on_context: bool = True
    """Whether prefix and suffix are targets too, as in the paper; False: only the middle is."""
    room: int = 8
    """Character splits: slots reserved for the extra tokens of a cut; unused ones hold padding at
    the end of the document. A cut that needs more moves to the border of its token.
    """
    max_middle: int | None = None
    """Longest middle, in tokens, or in characters for character splits: the middle's length is
    drawn from 0 to this, then its place, both uniformly. None: as long as the points fall.
    """
    separator: int | str | None = None
    """Token between the fragments of a document, such as the files of a repository, as an id or a
    name; each fragment is infilled by itself and stays in its place. A document without this token
    is one fragment.
    """
    fragment_rate: float | None = None
    """The share of the fragments that are infilled in a document that is, if it has separators;
    None: `rate`.
    """
    fragment_tokens: int = 256
    """With a `separator`: an infilled document has slots for one infilled fragment, and one more
    for each this number of tokens; unused ones hold padding at its end. Of more fragments that are
    drawn, the others stay as they are.
    """
    ignore_prefix: int | str | None = None
    """Fragments (documents, without a `separator`) that begin so are not infilled: a token's id, a
    control token's name, or a text.
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
    starts: Starts | None = dataclasses.field(default=None, init=False, repr=False, compare=False)
    """`ignore_prefix` for the kernels; made by `resolve`."""

    def __repr__(self) -> str:
        """Its settings; those that came after the first release only where they are set, because
        states keep this text.
        """
        shown = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in dataclasses.fields(self)
            if each.repr and not (each.name in _LATER and getattr(self, each.name) == each.default)
        ]
        return f"Infill({', '.join(shown)})"

    def __post_init__(self) -> None:
        for name in ("rate", "spm_rate"):
            object.__setattr__(self, name, _share(name, getattr(self, name)))
        if self.split not in ("token", "character"):
            raise ConfigError(f"infill: split must be token or character, got {self.split!r}")
        object.__setattr__(self, "room", _whole("room", self.room, 0, 64))
        if self.tokens is not None:
            object.__setattr__(self, "tokens", _checked_tokens(self.tokens))
        self._check_fragments()

    def _check_fragments(self) -> None:
        for name in ("max_middle", "fragment_tokens"):
            value: Any = getattr(self, name)
            if name != "max_middle" or value is not None:
                object.__setattr__(self, name, _whole(name, value, 1))
        for name in ("separator", "ignore_prefix"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _checked_token(name, value))
        refuse_separator(self.separator, self.ignore_prefix, self.tokens or ())
        if self.fragment_rate is not None:
            object.__setattr__(self, "fragment_rate", _share("fragment_rate", self.fragment_rate))
            if self.separator is None:
                raise ConfigError(
                    "infill: fragment_rate is the share of fragments, and without a separator a "
                    "document is one; give separator, or rate alone"
                )

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
                f"and {self._reserved(1)} for infilling; give a longer sequence_length"
            )
        if self._is_resolved:
            return self
        tokenizer = tokenizer_of(facts, self.tokenizer, where)
        splitter = _splitter_of(tokenizer, where) if self.split == "character" else None
        separator = separator_id(self.separator, tokenizer, where)
        starts, ignored = starts_of(self.ignore_prefix, tokenizer, where)
        ids = infill_ids(self.tokens, tokenizer, pad=self._pads, where=where)
        resolved = dataclasses.replace(self, tokens=ids, separator=separator, ignore_prefix=ignored)
        object.__setattr__(resolved, "splitter", splitter)
        object.__setattr__(resolved, "starts", starts)
        return resolved

    @property
    def _is_resolved(self) -> bool:
        """Whether it needs no tokenizer."""
        given = (*(self.tokens or ("",)), self.separator or 0, self.ignore_prefix or 0)
        return (
            self.split == "token"
            and all(isinstance(token, int) for token in given)
            and not (self._pads and len(self.tokens or ()) < 4)
        )

    def document_limit(self, sequence_length: int) -> int:
        """The longest document, in tokens, that fits a row for every key."""
        if not self.rate:
            return sequence_length
        lengths = range(sequence_length + 1)
        return bisect_right(lengths, sequence_length, key=lambda n: n + self._reserved(n)) - 1

    def measure(
        self, lengths: Annotated[Int64, "documents"], keys: Annotated[UInt64, "documents"]
    ) -> Annotated[Int64, "documents"]:
        """Slots: the length, plus 3 and `room` for an infilled document, or for each fragment that
        it has slots for.
        """
        slots = np.empty(len(lengths), np.int64)
        measure_each(
            self._program(), np.asarray(lengths, np.int64), np.asarray(keys, np.uint64), slots
        )
        return slots

    def program(self) -> Annotated[Int64, "numbers"] | None:
        """The program of the compiled writer, after `resolve`; None where a document may need
        padding, which `write` adds.
        """
        return None if self._pads else self._program()

    @property
    def task_names(self) -> tuple[str, ...]:
        """All names that `task` may return."""
        return ORDERS if self.separator is None else FRAGMENT_TASKS

    @property
    def added_tokens(self) -> tuple[int, ...]:
        """Ids that it inserts into documents, as far as they are known."""
        return tuple(token for token in self.tokens or () if isinstance(token, int))

    def task(self, length: int, key: int) -> str:
        """ "PSM", "SPM" or "causal", as drawn; with a separator, "infilled" or "causal"."""
        order = _decide_infill(self._program(), length, np.uint64(key))[0]
        return ORDERS[order] if self.separator is None else FRAGMENT_TASKS[order != CAUSAL]

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
        if self._pads:
            return self._write_padded(tokens, given, key)
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

        Character splits and fragments are found by the infilling tokens, so a document that holds
        these tokens itself, or ends with padding, is not restored.
        """
        order, first, second = _decide_infill(self._program(), length, np.uint64(key))
        if order == CAUSAL:
            return written
        if self._pads:
            kept = written[: len(written) - int(np.argmax(written[::-1] != self._ids()[3]))]
            parts = []
            for fragment in self.fragments(kept, key):
                parts += [kept[section] for section in fragment.sections]
                parts.append(kept[fragment.end : fragment.end + 1])  # the separator
            return np.concatenate(parts)
        prefix, suffix, middle = _places_of(order, length, first, second)
        sections = [(prefix, first), (middle, second - first), (suffix, length - second)]
        return np.concatenate([written[begin : begin + size] for begin, size in sections])

    def fragments(self, written: Annotated[Int32, "slots"], key: int) -> list[WrittenFragment]:
        """The fragments of an infilled document as written, without its padding; without a
        separator, one.
        """
        return read_fragments(
            self._program(), written, key, separator=self._separator, ids=self._ids()[:3]
        )

    def _write_padded(self, tokens: Int32, weights: Float32, key: int) -> Written:
        """Write a document into slots that it may not need all of."""
        if self.split == "character" and self.splitter is None:
            raise ConfigError(
                "infill: character splits need the tokenizer; call resolve(facts) first"
            )
        fragments = Fragments.draw(
            self._program(),
            tokens,
            key,
            separator=self._separator,
            starts=self._starts,
            splitter=self.splitter,
        )
        slots = len(tokens) + self._reserved(len(tokens))
        padded, weighed = np.full(slots, self._ids()[3], np.int32), np.zeros(slots, np.float32)
        if self.splitter is None:
            used = fragments.write(self._program(), tokens, weights, padded, weighed)
        else:
            written = fragments.at_characters(
                tokens,
                weights,
                splitter=self.splitter,
                ids=self._ids()[:3],
                room=self.room,
                train_on_context=self.train_on_context,
            )
            used = len(written.ids)
            padded[:used], weighed[:used] = written.ids, written.weights
        return Written(tokens=padded, weights=weighed, padding=slots - used)

    @property
    def _pads(self) -> bool:
        """Whether a document may need fewer slots than it is measured with."""
        return (
            self.split == "character"
            or self.separator is not None
            or self.ignore_prefix is not None
        )

    def _reserved(self, length: int) -> int:
        return int(_slots_reserved(self._program(), length))

    @property
    def _separator(self) -> int | None:
        if isinstance(self.separator, str):
            raise _unresolved("separator")
        return self.separator

    @property
    def _starts(self) -> Starts:
        if self.starts is not None:
            return self.starts
        if isinstance(self.ignore_prefix, str):
            raise _unresolved("ignore_prefix")
        return Starts.of_id(self.ignore_prefix)

    def _ids(self) -> tuple[int, ...]:
        if self.tokens is None or any(isinstance(token, str) for token in self.tokens):
            raise _unresolved("its tokens")
        if self._pads and len(self.tokens) < 4:
            raise _unresolved("a padding token")
        return tuple(int(token) for token in self.tokens)

    def _program(self) -> Int64:
        """See `_infill_kernels`; unknown ids are -1, which measuring ignores."""
        known = [token if isinstance(token, int) else -1 for token in self.tokens or (-1, -1, -1)]
        prefix, middle, suffix = known[:3]
        fragment_rate = self.rate if self.fragment_rate is None else self.fragment_rate
        rates = [round(rate * 2**32) for rate in (self.rate, self.spm_rate, fragment_rate)]
        numbers = [
            INFILL,
            *rates[:2],
            prefix,
            suffix,
            middle,
            int(self.train_on_context),
            self.room if self.split == "character" else 0,
            self.max_middle or 0,
            rates[2],
            0 if self.separator is None else self.fragment_tokens,
        ]
        return np.array(numbers, np.int64)


def _unresolved(what: str) -> ConfigError:
    return ConfigError(
        f"infill: the ids of {what} are not known yet; call resolve(facts), or give ids"
    )


def _share(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ConfigError(f"infill: {name} must be a share from 0 to 1, got {value!r}")
    return float(value)


def _whole(name: str, value: Any, least: int, most: int = 2**31 - 1) -> int:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    number = int(value) if whole else least - 1
    if not least <= number <= most:
        what = "slots" if name == "room" else "tokens"
        raise ConfigError(
            f"infill: {name} must be a number of {what} from {least} to {most}, got {value!r}"
        )
    return number


def _checked_token(name: str, value: Any) -> int | str:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) < 2**31:
        kinds = "an id or a name" if name == "separator" else "an id, a name or a text"
        raise ConfigError(f"infill: {name} must be {kinds}, got {value!r}")
    return int(value)


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
