"""A step of the loader: this rank's rows of one optimiser step."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast, final, overload

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import MissingExtraError
from penstock.core.json_values import JsonObject
from penstock.core.notebook import card
from penstock.plan.inputs.model_input import ModelInput, StepFields
from penstock.plan.loader.on_demand import StepArrays
from penstock.plan.loader.step_documents import StepDocuments

if TYPE_CHECKING:
    import jax
    import torch

    from penstock.plan.loader.filled_rows import FilledRows

_SHOWN_ROWS = 8
"""Rows of a step that a notebook shows."""


@final
class Step:
    """This rank's model inputs of one optimiser step.

    Attributes:
        index: Number of the step, from 0.
        loss_denominator: Sum of the loss weights of all targets at distance 1 in the whole step,
            over all ranks: divide the sum of weighted losses by it, and micro-batching, packing and
            ranks do not change the loss.
        loss_denominators: The same for each target distance.
        num_tokens: Tokens of the whole step over all ranks, without padding; what paths share is
            counted once.
        units: Of the prefix trees of the whole step over all ranks: `branches`, `paths`, `pairs`
            (of a better and a worse path), `examples` (labelled paths) and `path_tokens` (each path
            counted whole); empty without trees.
    """

    __slots__ = (
        "_documents",
        "_place",
        "_resume_state",
        "_rows",
        "index",
        "loss_denominators",
        "num_tokens",
        "units",
    )

    def __init__(
        self,
        index: int,
        rows: "FilledRows",
        loss_denominators: tuple[float, ...],
        num_tokens: int,
        resume_state: Callable[[], JsonObject],
        documents: Callable[[], StepDocuments],
        units: dict[str, int] | None = None,
        place: Callable[[], JsonObject] = dict,
    ) -> None:
        self._place, self._documents = place, documents
        self.units = units or {}
        self.index, self._rows, self.num_tokens = index, rows, num_tokens
        self.loss_denominators = loss_denominators
        self._resume_state = resume_state

    def __repr__(self) -> str:
        return (
            f"Step({self.index}: {len(self)} rows here; over all ranks {self.num_tokens} tokens, "
            f"loss_denominator {self.loss_denominator:g})"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: the step's totals, and its first rows as strips."""
        facts = [
            ("rows of this rank", len(self)),
            ("tokens over all ranks", f"{self.num_tokens:,}"),
            ("loss denominator", f"{self.loss_denominator:g}"),
        ]
        rows = [row.strip_html() for row in self._rows[:_SHOWN_ROWS]]
        more = (
            [f"<div>and {len(self) - _SHOWN_ROWS} rows more</div>"]
            if len(self) > _SHOWN_ROWS
            else []
        )
        return card(f"Step {self.index}", facts, *rows, *more)

    @property
    def loss_denominator(self) -> float:
        """See the class."""
        return self.loss_denominators[0]

    @property
    def resume_state(self) -> JsonObject:
        """State of the loader after this step, whatever was prefetched: JSON-serialisable, a
        kilobyte or two.
        """
        return self._resume_state()

    @property
    def place(self) -> JsonObject:
        """Where each source stands after this step, for a loader with other data:
        `Loader(continue_from=step.place)`.

        JSON-serialisable; it names the documents of a window of rows, so it may have some ten
        kilobytes.
        """
        return self._place()

    @property
    def documents(self) -> StepDocuments:
        """The documents of this rank's rows, in order: source, number, row and slots of each."""
        return self._documents()

    def arrays(self) -> StepFields[Array]:
        """This rank's rows in one array for each field: R rows of T slots, D target distances.

        A field is made when it is first asked for; `dict(step.arrays())` has all. Tokens and
        targets are never copied, but for a loader without a required dtype whose steps were also
        taken by `torch`: it fills in int64 then, and these arrays are int32 all the same.

        Returns:
            `tokens`, `positions`, `document_ids` (of each row), `prefix` [R, T]; `targets`,
            `loss_weights` [R, D, T]; `cu_seqlens` int32, cumulative lengths of all documents in the
            rows end to end, where the padding of a row is a document of its own; `max_seqlen` and
            `num_tokens`, numbers; `tokens_per_row`, a list: those of each row without padding;
            `reach` of the nodes of trees; `columns`, name → [R, T]. Fields that the loader's
            requirements do not ask for are None.
        """
        return cast("StepFields[Array]", StepArrays(make=self._rows.field))

    def torch(self, device: Any = None, *, non_blocking: bool = True) -> "StepFields[torch.Tensor]":
        """`arrays` as torch tensors: tokens, targets and positions in int64.

        On the CPU they share memory with the loader's buffers, which are not written again while a
        tensor is held; each is made when it is first asked for, and the steps after the first are
        filled in int64. For another device, all fields are copied at once.

        Args:
            device: Target device; None: the CPU.
            non_blocking: Copy from page-locked memory without waiting.
        """
        from penstock.plan.inputs.torch_tensors import as_host_tensor, as_tensors, is_cpu

        rows = self._rows
        if not is_cpu(device):
            # Fewer bytes are copied in int32, so the loader goes on filling that.
            filled = {name: rows.field_as_filled(name) for name in StepFields.__annotations__}
            return cast("StepFields[torch.Tensor]", as_tensors(filled, device, non_blocking))
        rows.widen()

        def make(name: str) -> Any:
            return as_host_tensor(name, rows.field_as_filled(name))

        return cast("StepFields[torch.Tensor]", StepArrays(make=make))

    def jax(self, device: object = None) -> "StepFields[jax.Array]":
        """`arrays` as JAX arrays on a device or sharding; None: JAX's default device."""
        try:
            import jax
        except ImportError as error:
            raise MissingExtraError("jax", "jax") from error

        arrays = {**self.arrays()}
        moved = {
            name: jax.device_put(value, device)
            for name, value in arrays.items()
            if isinstance(value, np.ndarray)
        }
        return cast("StepFields[jax.Array]", {**arrays, **moved})

    def joined(self, rows_per_pass: int) -> Iterator[ModelInput]:
        """This rank's rows, `rows_per_pass` of them end to end as one long row: fewer, larger
        passes of a model.

        ```python
        for rows in step.joined(4):
            ps.loss(model, rows, step.loss_denominators).backward()
        ```

        Losses and gradients are those of the single rows, up to rounding, for a model that keeps
        the documents of a row apart. The padding of each row is a document without targets; its
        source id is −1. Without a copy, but for `document_ids` and several target distances.

        Args:
            rows_per_pass: Rows of one input; the last may have fewer. 1: the rows themselves.
        """
        return self._rows.joined(rows_per_pass)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> ModelInput: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ModelInput]: ...
    def __getitem__(self, index: int | slice) -> ModelInput | Sequence[ModelInput]:
        return self._rows[index]

    def __iter__(self) -> Iterator[ModelInput]:
        return iter(self._rows)
