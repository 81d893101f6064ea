"""How a model of transformers runs a row of several documents, if our attention does not fit it:
the first exact way.

1. *own*: transformers' own packed rows, with restarting positions and borders (`model_inputs`).
2. *borders*: the same, with our recurrences and convolutions in place of its named ones, and
   positions for the makers of masks that do not get them (`their_recurrence`). Before that *mixed*:
   also with our attention in the layers that attend, which needs no mask of all pairs.
3. *batch*: the documents as a batch. They are sorted by length, those of like length run side by
   side with padding behind them, which a causal model cannot see, and the results are put back. It
   works for nearly every causal model that reads embeddings. Some notice padding (sparse attention
   that picks among all keys): for these only documents of *equal* length run side by side.

Each is judged by `try_isolation`: each document must give the logits that transformers gives it
alone, also in a row of the length in use, and gradients between documents must be exactly 0.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal, final

import torch
from torch import Tensor

from penstock.core.arrays import Array
from penstock.core.errors import IsolationError
from penstock.models.attention import LayerAttend, RowAttend, RowAttention
from penstock.models.isolation.documents import changing_rotary, try_isolation
from penstock.models.isolation.lengths import (
    DOCUMENT_LENGTHS,
    documents_of_a_row,
    longer_documents,
    rotary_limit,
)
from penstock.models.isolation.report import describe
from penstock.models.language_model import PackingVerdict
from penstock.models.recurrent import Borders
from penstock.models.recurrent.borders import LIKE_LENGTH, LIKE_SLOTS, document_batches
from penstock.models.row_tensors import RowTensors
from penstock.models.theirs.attention import InBatch
from penstock.models.theirs.interface import TheirModel
from penstock.models.theirs.recurrence import bordered, is_recurrence
from penstock.models.theirs.tensors import model_inputs
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.torch_tensors import on_device

_log = logging.getLogger("penstock.models")

PackedWay = Literal["own", "mixed", "borders", "batch", "equal"]

TRIED: tuple[PackedWay, ...] = ("own", "mixed", "borders", "batch", "equal")
MOST_COMPARED = 1024
"""Numbers of each slot that are compared in long rows."""


@final
class PackedWays:
    """The ways of one model that have not failed; the first is in use.

    Attributes:
        says: Whether the way in use is logged.
    """

    def __init__(self, model: TheirModel) -> None:
        self._model = model
        self._ways: list[PackedWay] = ["own"] if model.uses_our_attention else list(TRIED)
        if model.operations.backends and not model.uses_our_attention:
            # Only these run them.
            self._ways = ["mixed", "borders"]
        self._verdicts: dict[int, PackingVerdict] = {}
        self._tried: dict[tuple[PackedWay, tuple[int, ...]], str | None] = {}
        self._limit = rotary_limit(model.inner)
        self._trying = self._cost_said = False
        self.says = True
        self._called: set[str] = set()
        # What layers that attend ask for; found by the first trial.
        self._windows: dict[int | None, None] = {}
        self._softcap: float | None = None

    def packing(self, slots: int) -> PackingVerdict:
        """Whether documents may share a row of `slots` slots; tested once."""
        if slots not in self._verdicts:
            before = self._ways[0] if self._verdicts else None
            trial = self._model.trial_model
            if trial is self._model:
                self._verdicts[slots] = self._find(slots)
            else:
                self._verdicts[slots] = trial.packing(slots)
                self._follow(trial.packed)
            if self.says and self._ways[0] != before and self._verdicts[slots].longest:
                _log.info(
                    "%s: rows of several documents run with %s",
                    describe(self._model),
                    self.describe(),
                )
        return self._verdicts[slots]

    def _follow(self, other: Any) -> None:
        """Run rows as another of the same model does."""
        self._ways, self._called = other._ways, other._called
        self._windows, self._softcap = other._windows, other._softcap

    def describe(self) -> str:
        """The way in use, in words; what runs with it must have been asked of `packing` before."""
        if self._model.uses_our_attention:
            return "our attention"
        if self._ways[0] == "own":
            return "transformers' attention and restarting positions"
        if self._ways[0] in ("batch", "equal"):
            like = self._ways[0] == "batch"
            return f"documents of {'like' if like else 'equal'} length side by side, as a batch"
        ours = sorted(name for name in self._called if is_recurrence(name))
        if not ours:
            return "transformers' attention, with positions in its masks"
        also = "our attention, and " if self._ways[0] == "mixed" and self._windows else ""
        by = f" ({self._model.operations.describe()})" if self._model.operations.backends else ""
        return f"{also}our recurrent functions{by} in place of {', '.join(ours)}"

    @property
    def several_passes(self) -> bool:
        """Whether a row takes several passes, with padding."""
        return self._ways[0] in ("batch", "equal")

    def cost(self, begins: Array, ends: Array) -> str:
        """What a row that takes several passes costs, in words.

        Args:
            begins: int64 [documents], first slot of each.
            ends: int64 [documents], the slot after the last of each.
        """
        batches = self._batches(begins, ends, int(ends.max(initial=0)))
        run, real = (
            sum(inside.size for _, inside in batches),
            sum(int(inside.sum()) for _, inside in batches),
        )
        return f"{len(batches)} passes, {(run - real) / max(run, 1):.0%} padding"

    def _batches(self, begins: object, ends: object, total: int) -> list[tuple[Any, Any]]:
        like = (LIKE_LENGTH, LIKE_SLOTS) if self._ways[0] == "batch" else (1.0, 0)
        return document_batches(begins, ends, total, *like)

    def _find(self, slots: int) -> PackingVerdict:
        first, before = None, list(self._ways)
        while (reason := self._reason(slots)) is not None:
            first = first or reason
            if len(self._ways) == 1:
                # Shorter rows may run in a way that fails for these.
                self._ways = before
                return PackingVerdict(0, first)
            self._ways.pop(0)
        if self._limit is not None and slots > self._limit[0]:
            reason = changing_rotary(self._model, slots, *self._limit)
            return PackingVerdict(self._limit[0], reason, self.describe())
        return PackingVerdict(slots, way=self.describe())

    def _reason(self, slots: int) -> str | None:
        """Why rows of so many slots must not run in the first way; None: they may."""
        model = self._model
        asked = [DOCUMENT_LENGTHS, longer_documents(model, slots)]
        if not model.uses_our_attention:
            # What its own code does with a row may depend on the row's length.
            asked.append(documents_of_a_row(model, slots))
        for lengths in asked:
            if lengths is not None and (reason := self._try(lengths)) is not None:
                return reason
        return None

    def _try(self, lengths: tuple[int, ...]) -> str | None:
        """The error of `try_isolation` for documents of these lengths; None: they are kept
        apart.
        """
        key = self._ways[0], lengths
        if key not in self._tried:
            long = lengths != DOCUMENT_LENGTHS

            def forward(_: object, row: ModelInput) -> Tensor:
                hidden = self._model(self._model.row_tensors(row))
                # Logits of a long row would take much memory, and hidden states reveal a leak just
                # as well.
                return hidden[0, :, :MOST_COMPARED] if long else self._model.logits(hidden)[0]

            self._trying = True
            try:
                try_isolation(self._model, forward, lengths=lengths, gradients=not long)
                self._tried[key] = None
            except IsolationError as error:
                self._tried[key] = str(error)
            finally:
                self._trying = False
        return self._tried[key]

    def runs_single_documents(self) -> bool:
        """Whether our functions also run rows of one document: they are faster than transformers'
        slow ones.
        """
        return (
            self._ways[0] in ("mixed", "borders")
            and not self._trying
            and any(map(is_recurrence, self._called))
        )

    def hidden(self, row: RowTensors, call: Callable[[dict[str, Any]], Tensor]) -> Tensor:
        """Final hidden states [1, T, width] of a row.

        Args:
            row: The row.
            call: Arguments of transformers → hidden states [B, n, width].
        """
        inner, device = self._model.inner, self._model.device
        if self.several_passes:
            return self._in_batches(row, call)
        given = model_inputs(row.source, device)
        if self._ways[0] == "own":
            return call(given)
        mixed = self._ways[0] == "mixed"
        if mixed:
            given["penstock_attend"] = InBatch(self._attend(row))
        borders, operations = Borders([0, *row.rule.pieces[:, 2]], device), self._model.operations
        with bordered(inner, borders, ours=mixed, operations=operations) as called:
            found = call(given)
        self._called |= called
        return found

    def _attend(self, row: RowTensors) -> LayerAttend:
        """Our attention for whatever layers have attention, with the window and the limit that each
        asks for.
        """
        device, dtype = self._model.device, self._model.compute_dtype

        def attention(window: int | None) -> RowAttention:
            return RowAttention.of(
                row.rule, device=device, dtype=dtype, window=window, softcap=self._softcap
            )

        known = RowAttend.of(tuple(self._windows), attention)
        if not self._trying:
            return known

        def discover(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self._windows and layer.softcap != self._softcap:
                raise IsolationError("its layers keep scores within different numbers")
            self._softcap = layer.softcap
            self._windows[layer.window] = None
            return attention(layer.window)(q, k, v, layer.sinks)

        return discover

    def _in_batches(self, row: RowTensors, call: Callable[[dict[str, Any]], Tensor]) -> Tensor:
        # Embedded once, in the row's order, so that a check can follow each token.
        embedded = self._model.get_input_embeddings()(row.tokens[None])[0]
        wide = torch.cat([embedded, embedded.new_zeros(1, embedded.shape[1])])
        begins, _, ends = row.rule.pieces.T
        real = begins < row.source.num_tokens
        parts: list[Tensor] = []
        places: list[Tensor] = []
        if not self._trying and not self._cost_said:
            self._cost_said = True
            _log.info(
                "%s: a first row takes %s",
                describe(self._model),
                self.cost(begins[real], ends[real]),
            )
        for slots, inside in self._batches(begins[real], ends[real], len(row.tokens)):
            index, kept = (on_device(array, wide.device) for array in (slots, inside))
            hidden = call({"inputs_embeds": wide[index], "use_cache": False})
            parts.append(hidden[kept])
            places.append(index[kept])
        found = torch.cat(parts)
        out = found.new_zeros(len(row.tokens), found.shape[1])
        return out.index_copy(0, torch.cat(places), found)[None]
