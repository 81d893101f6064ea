"""Fills the steps that a plan gives: this rank's rows, with what stores, Python objectives and a
companion add to them.
"""

from collections.abc import Sequence
from functools import partial
from typing import final

from penstock.data.shards import Corpus
from penstock.plan.loader import companion as companions
from penstock.plan.loader import state as states
from penstock.plan.loader.buffers import cuda_in_use, heap, pinned
from penstock.plan.loader.data_parallel import DataParallel
from penstock.plan.loader.extras import Extras
from penstock.plan.loader.fetching import Fetching
from penstock.plan.loader.fill import Fill
from penstock.plan.loader.loader_settings import LoaderSettings
from penstock.plan.loader.mixture import Mixture
from penstock.plan.loader.plan import Plan
from penstock.plan.loader.standing import place_after
from penstock.plan.loader.step_documents import StepDocuments
from penstock.plan.loader.step_planner import StepPlan
from penstock.plan.loader.steps import Step


@final
class StepFilling:
    """Makes a step of its plan, in any thread."""

    def __init__(
        self,
        mixture: Mixture,
        datasets: Sequence[Corpus],
        plan: Plan,
        settings: LoaderSettings,
    ) -> None:
        self._plan, of_plan, requirements = plan, settings.plan, settings.merged_requirements()
        self._data_parallel: DataParallel = settings.data_parallel
        self.extras = Extras(
            mixture.sources,
            datasets,
            plan.rewritings,
            requirements,
            of_plan.packing,
            of_plan.sequence_length,
            (settings.image_cache, settings.image_cache_bytes),
        )
        pin = cuda_in_use() if settings.pin_memory is None else settings.pin_memory
        self.fill = Fill(
            datasets,
            of_plan.sequence_length,
            requirements,
            settings.pad_id,
            plan.rewritings,
            self.extras,
            keep=2 * (settings.prefetch + settings.threads + 2),
            allocate=pinned if pin else heap,
        )
        self._accompany = companions.begin(settings.companion, mixture, datasets, plan.rewritings)
        in_python = any(rewriting.runs_in_python for rewriting in plan.rewritings)
        self._sum = settings.sum_over_ranks if in_python and self._data_parallel.size > 1 else None
        self.fetching = Fetching(
            mixture.sources,
            datasets,
            plan.rewritings,
            of_plan,
            requirements.target_distances or 1,
            settings.cache_bytes,
            rewrites_own=self._sum is not None,
        )
        self.description, self.epochs = states.describe(plan), states.epochs_of(plan)

    def own_rows(self, plan: StepPlan) -> tuple[int, int]:
        """This rank's rows of a step: the first, and one after the last."""
        return self._data_parallel.rows(len(plan.row_starts) - 1)

    def step(self, plan: StepPlan) -> Step:
        """One step, with its documents on this machine."""
        if not self.fetching:
            return self._step(plan)
        rows = self.own_rows(plan)
        with self.fetching.held(plan, *rows):
            return self.fetching.renewing(plan, *rows, lambda: self._step(plan))

    def _step(self, plan: StepPlan) -> Step:
        """Run Python objectives, fill this rank's rows, sum loss weights.

        The weights are those of all ranks' rows, or of this rank's if others will be added.
        """
        begin, end = self.own_rows(plan)
        self.fill.check_capacity(plan.pieces, plan.row_starts)
        pieces, row_starts, tokens = plan.pieces, plan.row_starts[begin : end + 1], None
        if self._sum is not None:
            tokens = int(pieces["length"].sum())
            pieces, row_starts = pieces[row_starts[0] : row_starts[-1]], row_starts - row_starts[0]
        python_output = self.fill.run_python(pieces)
        rows = self.fill.rows(pieces, row_starts, python_output)
        if self._accompany is not None:
            rows.accompany(self._accompany, pieces)
        weights, weighed = self.fill.weigh(pieces, python_output)
        return Step(
            plan.index,
            rows,
            weights,
            weighed if tokens is None else tokens,
            partial(states.save, self.description, self.epochs, plan.after),
            partial(StepDocuments.of, pieces, row_starts),
            self.extras.units(plan.pieces),
            partial(place_after, self._plan, plan),
        )

    def sum_weights(self, step: Step) -> None:
        """Add the loss weights of the other ranks, where each ran its own rows' objectives.

        Called for each step in order, by the thread that takes it.
        """
        if self._sum is not None:
            step.loss_denominators = tuple(map(float, self._sum([*step.loss_denominators])))
