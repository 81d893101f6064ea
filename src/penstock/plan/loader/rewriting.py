"""One source's objective at work: what the plan measures and the fill writes.

BOS and EOS are kept out of it: where all documents of a dataset have them, they are taken off
before a document is measured and rewritten, and put back at the very beginning and end. The key of
a document, or of a part of one, is of (seed, source, epoch, document, part).
"""

from dataclasses import replace
from typing import Annotated, Any, final

import numpy as np

from penstock.core.arrays import Array, Int32, Int64, Records, UInt64
from penstock.core.compiled import address_of
from penstock.core.errors import ConfigError
from penstock.core.randomness import key_for, mix_array
from penstock.data.shards import Corpus
from penstock.plan.loader._document_kernels import CAUSAL, COMPILED, PYTHON
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader.mixture import Source
from penstock.plan.objectives import Facts, Objective, Written
from penstock.plan.objectives.objective import (
    NO_TARGET,
    AddingTokens,
    Causal,
    Compiled,
    NamingTasks,
    Nodes,
    Resolving,
    RewritingEos,
    WithTasks,
    WritingNodes,
    fault_of,
    is_bidirectional,
    writes_targets,
)
from penstock.plan.sampling._kernels import ENTRY
from penstock.tokenizers import Tokenizer


@final
class Rewriting:
    """The objective of one source, resolved.

    Args:
        source: The source that has the objective.
        dataset: Its documents.
        size: Documents of an epoch.
        seed: The run's.
        sequence_length: Token slots of a row.
        longest: Maximum tokens of a document; None: as many as fit a row.

    Raises:
        ConfigError: The objective cannot work with this tokenizer or row, or its repr contains a
            memory address, so it differs between processes.
    """

    def __init__(
        self,
        source: Source,
        dataset: Corpus,
        size: int,
        seed: int,
        sequence_length: int,
        longest: int | None = None,
    ) -> None:
        self.where, self.sequence_length = f"source {source.name!r}", sequence_length
        self._dataset, self._size, self._longest = dataset, size, longest
        self._key = np.uint64(key_for(seed, "objective", source.name))
        # The causal objective is asked nothing more: protocols are slow to ask, and sources many.
        self.is_causal = isinstance(source.objective, Causal)
        self.objective: Objective = (
            source.objective if self.is_causal else self._resolved(source.objective)
        )
        self.limit = int(self.objective.document_limit(sequence_length))
        if self.limit < 1:
            raise ConfigError(
                f"{self.where}: objective {self.objective.name!r} can use no document in rows "
                f"of {sequence_length} tokens (its document_limit is {self.limit}); raise "
                "sequence_length"
            )
        self.limit = min(self.limit, longest or self.limit)
        # The array is held here, because kernels read it by address.
        self._program = (
            self.objective.program()
            if not self.is_causal and isinstance(self.objective, Compiled)
            else None
        )
        self._framed: tuple[bool, bool] = (False, False) if self.is_causal else dataset.framed
        if (
            not self.is_causal
            and isinstance(self.objective, RewritingEos)
            and self.objective.rewrites_eos
        ):
            self._framed = self._framed[0], False
        if " at 0x" in repr(self.objective):
            raise ConfigError(
                f"{self.where}: objective {self.objective.name!r} has no repr of its own, "
                "which a state needs to tell objectives apart; make it a frozen dataclass"
            )

    @property
    def bidirectional(self) -> bool:
        """Whether documents may have a prefix with tokens that see each other."""
        return not self.is_causal and is_bidirectional(self.objective)

    @property
    def writes_targets(self) -> bool:
        """Whether targets are the objective's own, and not the tokens behind slots."""
        return not self.is_causal and writes_targets(self.objective)

    @property
    def makes_nodes(self) -> bool:
        """Whether documents are cut into parts that see each other by a tree."""
        return not self.is_causal and isinstance(self.objective, WritingNodes)

    def nodes(self, pieces: Annotated[Records, "pieces"]) -> list[Nodes]:
        """The parts that the objective makes of each piece, a BOS among them as their root."""
        assert isinstance(self.objective, WritingNodes)
        heads, _, inner = self.framing(pieces)
        lengths = pieces["length"].tolist()
        found = []
        for head, left, slots in zip(heads.tolist(), inner.tolist(), lengths, strict=True):
            if not left:
                # Only read, so it may see itself whole.
                found.append(Nodes.whole(slots))
            elif head:
                found.append(self.objective.nodes(slots - 1).behind_one())
            else:
                found.append(self.objective.nodes(slots))
        return found

    @property
    def runs_in_python(self) -> bool:
        """Whether documents are rewritten in Python, before the compiled fill copies them."""
        return not self.is_causal and self._program is None

    def _resolved(self, objective: Objective) -> Objective:
        if not isinstance(objective, Resolving):
            return objective
        longest = self._dataset.longest
        facts = Facts(
            where=self.where,
            tokenizer=self._tokenizer,
            sequence_length=self.sequence_length,
            longest=min(longest, self._longest or longest),
        )
        return objective.resolve(facts)

    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._dataset.loaded_tokenizer
        if tokenizer is None:
            raise ConfigError(
                f"{self.where}: no tokenizer lies in the dataset's folder, so tokens have no "
                "names; give ids instead"
            )
        return tokenizer

    def describe(self, record: dict[str, Any]) -> None:
        """Fill in the fields of a `SOURCE_RECORD` that say what is done with its documents."""
        record["key"], record["epoch_documents"] = self._key, self._size
        record["begins_with_bos"], record["ends_with_eos"] = self._framed
        record["objective"] = CAUSAL if self.is_causal else PYTHON
        record["own_targets"] = self.writes_targets
        if self._program is not None:
            record["objective"] = COMPILED
            record["program"], record["program_length"] = (
                address_of(self._program),
                len(self._program),
            )

    def framing(
        self, pieces: Annotated[Records, "pieces"]
    ) -> tuple[Annotated[Int64, "pieces"], Annotated[Int64, "pieces"], Annotated[Int64, "pieces"]]:
        """For each piece, or each entry: whether BOS is taken off, whether EOS is, and how many
        tokens are left.

        Where nothing would be left, nothing is taken off, and 0 tokens are left.
        """
        stored = self._dataset.table.lengths[pieces["document"], 0].astype(np.int64)
        head = ((pieces["begin"] == 0) & self._framed[0]).astype(np.int64)
        tail = ((pieces["begin"] + pieces["tokens"] == stored) & self._framed[1]).astype(np.int64)
        inner = pieces["tokens"] - head - tail
        head[inner <= 0] = tail[inner <= 0] = 0
        return head, tail, np.maximum(inner, 0)

    def keys(self, pieces: Annotated[Records, "pieces"]) -> Annotated[UInt64, "pieces"]:
        """The key of each piece, or of each entry."""
        epoch = pieces["position"] // self._size
        return mix_array(
            mix_array(mix_array(self._key, epoch), pieces["document"]), pieces["begin"]
        )

    def measure(self, entries: Annotated[Records, ENTRY, "entries"]) -> None:
        """Write how many slots each entry takes into its `length`.

        Raises:
            ConfigError: The objective gives an impossible number.
        """
        head, tail, inner = self.framing(entries)
        some = inner > 0
        measured = np.asarray(self.objective.measure(inner[some], self.keys(entries[some])))
        if measured.shape != (some.sum(),) or measured.dtype.kind not in "iu":
            raise ConfigError(
                f"{self.where}: objective {self.objective.name!r} measures {some.sum()} "
                f"documents as {measured.dtype} {list(measured.shape)}; expected a whole "
                "number for each"
            )
        lengths = entries["length"]
        lengths[some] = measured + head[some] + tail[some]
        if len(bad := np.flatnonzero((lengths < 1) | (lengths > self.sequence_length))):
            raise ConfigError(
                f"{self.where}: objective {self.objective.name!r} measures a document of "
                f"{entries['tokens'][bad[0]]} tokens as {lengths[bad[0]]}; rows hold 1 … "
                f"{self.sequence_length}"
            )

    def words(self, piece: np.void) -> Annotated[Int32, "length"]:
        """What the objective is given of a piece: its tokens without the BOS and EOS that the
        loader puts around the result.
        """
        head, _, inner = (int(part[0]) for part in self.framing(_alone(piece)))
        begin = int(piece["begin"]) + head
        found: Annotated[Int32, "length"] = (
            self._dataset[int(piece["document"])].tokens[begin : begin + inner].astype(np.int32)
        )
        return found

    def words_end_with_eos(self, piece: np.void) -> bool:
        """Whether the last of `words` is the EOS that all documents of the dataset have."""
        stored = int(self._dataset.table.lengths[int(piece["document"]), 0])
        ends = int(piece["begin"] + piece["tokens"]) == stored
        return ends and self._dataset.framed[1] and not self._framed[1] and not self.is_causal

    def task(self, piece: np.void) -> str:
        """The name of what is done to a piece; empty where the objective has no names."""
        inner = int(self.framing(_alone(piece))[2][0])
        if not isinstance(self.objective, WithTasks) or not inner:
            return ""
        return self.objective.task(inner, int(self.keys(_alone(piece))[0]))

    @property
    def task_names(self) -> tuple[str, ...]:
        """What `tasks` may give."""
        names = self.objective.task_names if isinstance(self.objective, NamingTasks) else ()
        return names or (self.objective.name,)

    @property
    def added_tokens(self) -> tuple[int, ...]:
        """Ids that its objective inserts into documents."""
        return self.objective.added_tokens if isinstance(self.objective, AddingTokens) else ()

    def tasks(self, pieces: Annotated[Records, PIECE, "pieces"]) -> list[str]:
        """What is done to each piece, one of `task_names`; the first of them where nothing of it
        can be trained.
        """
        first, *others = self.task_names
        if not others or not isinstance(self.objective, WithTasks):
            return [first] * len(pieces)
        name = self.objective.task
        inner, keys = self.framing(pieces)[2].tolist(), self.keys(pieces).tolist()
        return [
            name(length, key) if length else first for length, key in zip(inner, keys, strict=True)
        ]

    def write(self, piece: np.void) -> Written:
        """Rewrite one piece in Python: equivalent to the compiled rewriting, and works for every
        objective.

        Raises:
            ConfigError: The objective does not write what it measured.
        """
        head, tail, inner = (int(part[0]) for part in self.framing(_alone(piece)))
        document = self._dataset[int(piece["document"])]
        here = slice(int(piece["begin"]), int(piece["begin"] + piece["tokens"]))
        if document.tokens[here].max(initial=0) >= 2**31:
            raise ConfigError(
                f"{self.where}: document {int(piece['document'])} has a token id of 2^31 or "
                f"more; objective {self.objective.name!r} works on ids below 2^31 only"
            )
        tokens, weights = document.tokens[here].astype(np.int32), document.loss_weights[here]
        if not inner:
            return self._by_slot(Written(tokens=tokens, weights=np.zeros_like(weights)))
        between = slice(head, head + inner)
        weighted = self._dataset.table.has_spans
        written = self.objective.write(
            tokens[between],
            weights[between] if weighted else None,
            int(self.keys(_alone(piece))[0]),
        )
        if fault := fault_of(self.objective, written, int(piece["length"]) - head - tail):
            raise ConfigError(
                f"{self.where}: objective {self.objective.name!r} {fault}; "
                "penstock.objectives.check_objective tries an objective"
            )
        inside = (
            np.ones(len(written.tokens), np.float32) if written.weights is None else written.weights
        )
        kept, eos = len(inside) - written.padding, slice(head + inner, None)

        def framed(before: Array, inside: Array, behind: Array) -> Array:
            return np.concatenate([before, inside[:kept], behind, inside[kept:]])

        targets, outer = None, weights
        if written.targets is not None:
            none = np.full(len(tokens), NO_TARGET, np.int32)
            targets = framed(none[:head], written.targets, none[eos]).astype(np.int32)
            outer = np.zeros_like(weights)
        return self._by_slot(
            Written(
                tokens=framed(tokens[:head], written.tokens, tokens[eos]).astype(np.int32),
                weights=framed(outer[:head], inside, outer[eos]).astype(np.float32),
                targets=targets,
                denominator=written.denominator,
                prefix=written.prefix + head if written.prefix else 0,
                padding=written.padding,
            )
        )

    def _by_slot(self, written: Written) -> Written:
        """With targets, weights and denominator by slot, if the objective's targets are its own."""
        if not self.writes_targets:
            return written
        weights, targets = written.weights, written.targets
        assert weights is not None
        if targets is None:
            targets = np.append(written.tokens[1:], np.int32(NO_TARGET)).astype(np.int32)
            weights = np.append(weights[1:], np.float32(0))
        targets = np.where(weights == 0, np.int32(NO_TARGET), targets)
        weights = np.where(targets == NO_TARGET, np.float32(0), weights)
        denominator = written.denominator
        if denominator is None:
            denominator = float(weights.sum(dtype=np.float64))
        return replace(written, targets=targets, weights=weights, denominator=denominator)


def _alone(piece: np.void) -> Annotated[Records, "1"]:
    """A piece as an array of one."""
    return np.asarray(piece).reshape(1)
