"""Infilling of repositories: fragments of a document, such as files, are infilled each by itself.

How many fragments a document has is not known when it is measured, so an infilled document gets
slots for one fragment and one more for each `fragment_tokens` tokens; slots that are left hold
padding at its end, behind its EOS. If more fragments are drawn than have slots, as many of them as
have are infilled, a uniform choice, and the others stay as they are. So the measured length is
exact, and no token is lost.

Costs: a few passes over the document in compiled code, and about 60 µs of Python per document;
character splits cost as much per fragment as else per document.

Source: the options of fill-in-the-middle of Megatron-LM's descendants (split at a token, fragment
rate, start that is not infilled); these cut the end of a text that became too long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Array, Bool, Bytes, Float32, Int32, Int64
from penstock.core.compiled import from_python
from penstock.core.errors import ConfigError, TokenizerError
from penstock.core.randomness import philox
from penstock.plan.objectives import _infill_kernels as kernels
from penstock.plan.objectives._infill_kernels import CAUSAL, DECIDE, PSM, ROOM, SPM, SPM_RATE
from penstock.plan.objectives.character_splits import CharacterSplitter, Section
from penstock.plan.objectives.control_tokens import id_of
from penstock.tokenizers import Tokenizer

_philox, _reserved = from_python(philox), from_python(kernels.reserved)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Starts:
    """The starts of fragments that are not infilled, for the kernels."""

    first_id: int
    """A token; −1: none."""
    texts: Annotated[Bytes, "bytes"]
    """Texts end to end."""
    ends: Annotated[Int64, "texts"]
    """Where each text ends."""
    data: Annotated[Bytes, "spelled"]
    """The bytes of all ids, end to end."""
    offsets: Annotated[Int64, "offsets"]
    """Where each id's bytes begin."""

    @staticmethod
    def of_id(token: int | None) -> "Starts":
        """Fragments that begin with a token; None: no fragments."""
        none, numbers = np.empty(0, np.uint8), np.empty(0, np.int64)
        return Starts(-1 if token is None else token, none, numbers, none, np.zeros(1, np.int64))

    @staticmethod
    def of_text(text: str, tokenizer: Tokenizer) -> "Starts":
        """Fragments that begin with a text, or with what the tokenizer makes of it at the beginning
        of a document, where some put a space.

        Raises:
            TokenizerError: The tokenizer has no exact byte table.
        """
        table, own = tokenizer.byte_table, text.encode()
        begun = table.spell(tokenizer.inner.encode(text)).tobytes()
        texts = [own, *([begun] if begun != own and begun.endswith(own) else [])]
        ends = np.cumsum([len(one) for one in texts]).astype(np.int64)
        spelled = np.frombuffer(b"".join(texts), np.uint8).copy()
        return Starts(-1, spelled, ends, table.data.copy(), table.offsets.copy())

    def find(self, tokens: Int32, begins: Int64, ends: Int64, ignored: Bool) -> None:
        """Mark the fragments that begin so."""
        kernels.find_ignored(
            tokens, begins, ends, self.first_id, self.texts, self.ends, self.data, self.offsets,
            ignored,
        )  # fmt: skip


@final
@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """What is done with each fragment of a document. f fragments."""

    begins: Annotated[Int64, "fragments"]
    """First token."""
    ends: Annotated[Int64, "fragments"]
    """One after the last token: its separator, or the document's end."""
    orders: Annotated[Int64, "fragments"]
    """CAUSAL, PSM or SPM."""
    cuts: Annotated[Int64, "fragments 2"]
    """Split points, in tokens or characters of the fragment."""

    @staticmethod
    def draw(
        program: Annotated[Int64, "numbers"],
        tokens: Annotated[Int32, "length"],
        key: int,
        *,
        separator: int | None,
        starts: Starts,
        splitter: CharacterSplitter | None,
    ) -> "Fragments":
        """Draw them, for a document that is infilled.

        Args:
            program: See `_infill_kernels`.
            tokens: The document.
            key: Its key.
            separator: The token between fragments; None: the document is one fragment.
            starts: Of fragments that stay as they are.
            splitter: Counts characters; None: cuts are between tokens.
        """
        begins, ends = _borders(tokens, separator)
        sizes, total = ends - begins, len(begins)
        units = sizes if splitter is None else _characters(splitter, tokens, begins, ends)
        ignored, words = np.zeros(total, np.bool_), np.zeros(total, np.uint64)
        orders, cuts = np.zeros(total, np.int64), np.zeros((total, 2), np.int64)
        starts.find(tokens, begins, ends, ignored)
        kernels.draw_fragments(program, sizes, units, np.uint64(key), ignored, orders, cuts, words)
        drawn = np.flatnonzero(orders != CAUSAL)
        most = int(_reserved(program, len(tokens))) // (3 + int(program[ROOM]))
        # The words of those drawn are uniform below the rate, so the smallest are a uniform choice.
        orders[drawn[np.argsort(words[drawn], kind="stable")[most:]]] = CAUSAL
        return Fragments(begins, ends, orders, cuts)

    @property
    def columns(self) -> tuple[Int64, Int64, Int64, Int64]:
        """Its four arrays."""
        return self.begins, self.ends, self.orders, self.cuts

    def write(
        self,
        program: Annotated[Int64, "numbers"],
        tokens: Annotated[Int32, "length"],
        weights: Annotated[Float32, "length"],
        out_tokens: Annotated[Int32, "slots"],
        out_weights: Annotated[Float32, "slots"],
    ) -> int:
        """Write the document, cut between tokens, into the first slots; gives their number."""
        return int(
            kernels.write_fragments(
                program, tokens, weights, *self.columns, out_tokens, out_weights
            )
        )

    def at_characters(
        self,
        tokens: Annotated[Int32, "length"],
        weights: Annotated[Float32, "length"],
        *,
        splitter: CharacterSplitter,
        ids: Sequence[int],
        room: int,
        train_on_context: bool,
    ) -> Section:
        """The document, cut between characters.

        Args:
            tokens: The document.
            weights: Of its tokens.
            splitter: Cuts it.
            ids: Prefix, middle and suffix token.
            room: Most tokens that cutting one fragment may add.
            train_on_context: Whether prefix and suffix are targets.
        """
        parts = []
        for begin, end, order, (first, second) in zip(
            *(column.tolist() for column in self.columns), strict=True
        ):
            fragment = Section(tokens[begin:end], weights[begin:end])
            if order != CAUSAL:
                cut = splitter.split(fragment.ids, fragment.weights, first, second, room)
                context = _in_order(order, cut, ids, fragment.weights.max())
                if not train_on_context:
                    context.weights[:] = 0
                fragment = Section.joined([context, cut[1]])
            separator = Section(tokens[end : end + 1], weights[end : end + 1])
            parts += [fragment, separator]
        return Section.joined(parts)


def _in_order(
    order: int, cut: tuple[Section, Section, Section], ids: Sequence[int], whole: float
) -> Section:
    """What stands before the middle: the infilling tokens, prefix and suffix. `whole`: weight of a
    token that opens nothing.
    """
    (prefix, middle, suffix), (prefix_id, middle_id, suffix_id) = cut, ids
    if order == PSM:
        opened = [(prefix_id, [prefix]), (suffix_id, [suffix]), (middle_id, [middle])]
    else:
        opened = [(prefix_id, []), (suffix_id, [suffix]), (middle_id, [prefix, middle])]
    parts = []
    for token, sections in opened:
        part = Section.joined(sections)
        parts += [Section.of(token, part.weights.max() if len(part.ids) else whole), *sections]
    return Section.joined(parts[:-1])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFragment:
    """A fragment as it was written."""

    begin: int
    """First slot: of an infilled one, its prefix token."""
    end: int
    order: int
    """CAUSAL, PSM or SPM."""
    suffix: int = 0
    """Slot of the suffix token."""
    middle: int = 0
    """Slot of the middle token."""

    @property
    def sections(self) -> list[slice]:
        """Slots of its own tokens, in their order in the document."""
        if self.order == CAUSAL:
            return [slice(self.begin, self.end)]
        return [
            slice(self.begin + 1, self.suffix),
            slice(self.middle + 1, self.end),
            slice(self.suffix + 1, self.middle),
        ]


def read_fragments(
    program: Annotated[Int64, "numbers"],
    written: Annotated[Int32, "slots"],
    key: int,
    *,
    separator: int | None,
    ids: Sequence[int],
) -> list[WrittenFragment]:
    """The fragments of an infilled document, by the infilling tokens in it; a document that holds
    these itself is misread.

    Args:
        program: See `_infill_kernels`.
        written: As written, without padding.
        key: Its key.
        separator: As for `Fragments.draw`.
        ids: Prefix, middle and suffix token.
    """
    begins, ends = _borders(written, separator)
    found = []
    for number, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        block = 0 if len(begins) == 1 else number + 1
        places = [begin + np.flatnonzero(written[begin:end] == token) for token in ids]
        if not all(len(place) for place in places) or places[0][0] != begin:
            found.append(WrittenFragment(begin=begin, end=end, order=CAUSAL))
            continue
        which = _philox(np.uint64(block), np.uint64(DECIDE), np.uint64(key))[1]
        found.append(
            WrittenFragment(
                begin=begin,
                end=end,
                order=SPM if int(which) < int(program[SPM_RATE]) else PSM,
                middle=int(places[1][0]),
                suffix=int(places[2][0]),
            )
        )
    return found


def separator_id(separator: int | str | None, tokenizer: Tokenizer, where: str) -> int | None:
    """The id of the token between fragments.

    Raises:
        ConfigError: The tokenizer has no such entry.
    """
    if separator is None:
        return None
    return id_of(separator, "the separator", tokenizer, where)


def refuse_separator(
    separator: int | str | None, ignored: int | str | None, tokens: Sequence[int | str]
) -> None:
    """Raise a ConfigError if the separator is an infilling token, or begins the fragments that are
    not infilled.
    """
    if separator is None:
        return
    if separator in tokens:
        raise ConfigError(
            f"infill: the separator {separator!r} is one of the infilling tokens {tuple(tokens)}; "
            "give the token between files, such as '<file_sep>'"
        )
    if separator == ignored:
        raise ConfigError(
            f"infill: ignore_prefix is the separator, {separator!r}, and no fragment begins with "
            "that; give what comes after it"
        )


def starts_of(
    ignored: int | str | None, tokenizer: Tokenizer, where: str
) -> tuple[Starts, int | str | None]:
    """The starts of fragments that are not infilled, and the setting with a token's name as its id.

    Raises:
        ConfigError: The tokenizer lacks the id, or has no exact byte table, which a text needs.
    """
    if isinstance(ignored, str) and ignored not in tokenizer.special_tokens:
        try:
            return Starts.of_text(ignored, tokenizer), ignored
        except TokenizerError as error:
            raise ConfigError(
                f"{where}: texts of {tokenizer.name} cannot be compared with ignore_prefix "
                f"{ignored!r}: {error}; give a control token, or its id"
            ) from error
    if ignored is not None:
        ignored = id_of(ignored, "ignore_prefix", tokenizer, where)
    return Starts.of_id(ignored), ignored


def _borders(tokens: Array, separator: int | None) -> tuple[Int64, Int64]:
    """Where fragments begin and end."""
    found = np.flatnonzero(tokens == (-1 if separator is None else separator)).astype(np.int64)
    begins = np.concatenate([np.zeros(1, np.int64), found + 1])
    return begins, np.concatenate([found, np.array([len(tokens)], np.int64)])


def _characters(splitter: CharacterSplitter, tokens: Array, begins: Int64, ends: Int64) -> Int64:
    counts = [
        splitter.count(tokens[begin:end])
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
    ]
    return np.array(counts, np.int64)
