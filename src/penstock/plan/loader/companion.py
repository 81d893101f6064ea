"""A companion: what else is made of each row, in the loader's threads, ahead of training.

Distillation's teacher tokens are one. A companion sees rows as they are handed out, of this rank
only, and says nothing to the plan: states, fingerprints and steps are the same with it and without,
and a restore needs nothing from it. What it makes must depend on the row and its pieces alone; then
it is the same for any number of threads and ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, final

from penstock.core.arrays import Records
from penstock.data.shards import Corpus
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader.mixture import Mixture
from penstock.plan.loader.rewriting import Rewriting

Accompany = Callable[[ModelInput, Annotated[Records, PIECE, "documents"]], Any]
"""(row, its pieces as in a `Window`) → what becomes the row's `distillation`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CompanionSource:
    """What a companion knows of a source of the mixture."""

    name: str
    dataset: Corpus
    """The opened dataset."""
    objective: str
    """Name of its objective."""
    is_rewritten: bool
    """Whether the objective writes other tokens than the document's own."""
    task_names: tuple[str, ...]
    """What the objective may do to a document, by name; its own name where it has no tasks."""
    tasks: Callable[[Annotated[Records, PIECE, "documents"]], list[str]]
    """(pieces of this source) → the task of each."""


class Companion(Protocol):
    """Given to a `Loader`."""

    def begin(self, sources: Sequence[CompanionSource]) -> Accompany:
        """Make ready for the sources of one loader, in the order of the mixture; called once, as it
        is made.

        What is returned is called once for each row, **from several threads at once**; it must
        neither write to the row's arrays nor keep them longer than its result. What it raises
        reaches the caller at the row's step.

        Raises:
            ConfigError: It cannot accompany one of the sources.
        """


def begin(
    companion: Companion | None,
    mixture: Mixture,
    datasets: Sequence[Corpus],
    rewritings: Sequence[Rewriting],
) -> Accompany | None:
    """Begin a companion with the sources of a loader; None without one."""
    if companion is None:
        return None
    return companion.begin(
        [
            CompanionSource(
                name=source.name,
                dataset=dataset,
                objective=rewriting.objective.name,
                is_rewritten=not rewriting.is_causal,
                task_names=rewriting.task_names,
                tasks=rewriting.tasks,
            )
            for source, dataset, rewriting in zip(
                mixture.sources, datasets, rewritings, strict=True
            )
        ]
    )
