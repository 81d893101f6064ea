"""One optimiser step: this rank's rows, and what holds for the whole step."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final, overload

from penstock.inputs import ModelInput


@final
class Step:
    """This rank's model inputs of one optimiser step.

    Attributes:
        index: Number of the step, from 0.
        loss_denominator: Sum of the loss weights of all targets at distance 1 in the whole step, over all ranks:
            divide the sum of weighted losses by it, and micro-batching, packing and ranks do not change the loss.
        loss_denominators: The same for each target distance.
        num_tokens: Tokens of the whole step over all ranks, without padding.
    """

    __slots__ = ("_resume_state", "_rows", "index", "loss_denominators", "num_tokens")

    def __init__(
        self,
        index: int,
        rows: Sequence[ModelInput],
        loss_denominators: tuple[float, ...],
        num_tokens: int,
        resume_state: Callable[[], dict[str, Any]],
    ) -> None:
        self.index, self._rows, self.num_tokens = index, rows, num_tokens
        self.loss_denominators = loss_denominators
        self._resume_state = resume_state

    def __repr__(self) -> str:
        return (
            f"Step({self.index}: {len(self)} rows here; over all ranks {self.num_tokens} tokens, "
            f"loss_denominator {self.loss_denominator:g})"
        )

    @property
    def loss_denominator(self) -> float:
        """See the class."""
        return self.loss_denominators[0]

    @property
    def resume_state(self) -> dict[str, Any]:
        """State of the loader after this step, whatever was prefetched: JSON-serialisable, a kilobyte or two."""
        return self._resume_state()

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
