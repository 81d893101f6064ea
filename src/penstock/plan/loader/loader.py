"""The loader: steps of model inputs, blended, shuffled, packed, resumable at every step.

Every rank runs the same plan and fills only its own rows. With `threads` > 0, worker threads take
turns planning and fill steps in parallel; with 0, everything runs in the caller's thread. The steps
are the same bit for bit. Prefetching is never part of a state: `step.resume_state` is the position
after that step.

Only the consumer knows which of the returned steps are trained, since some consumers take steps
ahead of training. So `state_dict()` is refused while an iterator that returned a step is alive.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, Unpack, cast, final

from penstock.core.errors import ConfigError, StateError
from penstock.core.notebook import card, table
from penstock.core.suggestions import has_settings, suggests
from penstock.core.system import without_collector
from penstock.data.shards import Corpus
from penstock.media.rows import BlankImage
from penstock.plan.loader import state as states
from penstock.plan.loader.companion import Companion
from penstock.plan.loader.data_parallel import DataParallel, refuse_worker_process
from penstock.plan.loader.explain import PieceOrigin, explain
from penstock.plan.loader.fetching import Traffic
from penstock.plan.loader.loader_keywords import LoaderKeywords
from penstock.plan.loader.loader_settings import LoaderSettings, step_number
from penstock.plan.loader.mixture import Mixture, Sources, require_one_tokenizer, whole
from penstock.plan.loader.plan import Plan
from penstock.plan.loader.step_filling import StepFilling
from penstock.plan.loader.step_iterator import StepPipeline
from penstock.plan.loader.step_planner import StepPlan, StepPlanner, StepState, replay_progress
from penstock.plan.loader.steps import Step
from penstock.plan.loader.steps_ahead import StepsAhead
from penstock.plan.loader.target_watch import TargetWatch
from penstock.plan.objectives import Objective


@suggests
@final
class Loader:
    """Model inputs from a mixture, one optimiser step after another.

    ```python
    loader = ps.Loader({"data/web": 0.7, "data/code": 0.3}, sequence_length=4096, rows_per_step=64, seed=7)
    for step in loader:
        for row in step: ...
        save(step.resume_state)
    ```

    Iterating goes on where the last iteration stopped being consumed; it ends when every source has
    had its `max_epochs`. A last, short step is filled up with empty rows, so that all ranks have as
    many.

    The other keywords are the fields of `ps.loader.LoaderSettings`, which describes each;
    `Loader.of` takes them as one object.

    Args:
        mixture: The sources; a single `Source`, a path, an opened dataset, a list of these, or a
            mapping of path → share will do.

    Raises:
        ConfigError: A setting is out of range, or two disagree; or the companion refuses a source.
        DistributedError: Several processes, and `data_parallel` was left out.
    """  # noqa: E501

    @has_settings(LoaderSettings)
    def __init__(self, mixture: Mixture | Sources, **settings: Unpack[LoaderKeywords]) -> None:
        self._open(mixture, LoaderSettings(**settings))

    @classmethod
    def of(cls, mixture: Mixture | Sources, settings: LoaderSettings) -> "Loader":
        """A loader with settings that were made before."""
        loader = cls.__new__(cls)
        loader._open(mixture, settings)
        return loader

    def _open(self, mixture: Mixture | Sources, settings: LoaderSettings) -> None:
        """Open the sources, and put the parts together."""
        # Thousands of sources are hundreds of thousands of objects.
        with without_collector():
            self._open_now(mixture, settings)

    def _open_now(self, mixture: Mixture | Sources, settings: LoaderSettings) -> None:
        given: Mixture = mixture if isinstance(mixture, Mixture) else Mixture(cast(Any, mixture))
        self.loader_settings, self.settings = settings, settings.plan
        self.data_parallel: DataParallel = settings.data_parallel
        self.requirements = settings.merged_requirements()
        self.datasets: list[Corpus] = [source.open(settings.cache) for source in given.sources]
        self.mixture = given.weighed(self.datasets)
        require_one_tokenizer(self.mixture, self.datasets)
        self.start = settings.start
        self._plan = self.new_plan()
        self._filling = StepFilling(self.mixture, self.datasets, self._plan, settings)
        self._extras, self._fetching = self._filling.extras, self._filling.fetching
        self._ahead: StepsAhead | None = None
        self._description, self._epochs = self._filling.description, self._filling.epochs
        self._planner = StepPlanner(self._plan, self.data_parallel.size)
        self._run: StepPipeline[StepPlan, Step] | None = None
        self._after = self._planner.first
        self._skipped, self._untrained = (
            self._after.window_start.skipped,
            self._after.window_start.untrained,
        )
        # The iterator that gave the last step, as long as it has a holder.
        self._giver: weakref.ref[Iterator[Step]] | None = None

    def __iter__(self) -> Iterator[Step]:
        """Steps from the current state on.

        Raises:
            DistributedError: In a worker process of torch's `DataLoader`, where every worker would
                give every row.
            ConfigError: While iterating: a whole epoch of a source had no target (see
                `plan.loader.untrained`).
        """
        refuse_worker_process()
        itself: list[weakref.ref[Iterator[Step]]] = []
        steps = self._steps(itself)
        itself.append(weakref.ref(steps))
        return steps

    def _steps(self, itself: "list[weakref.ref[Iterator[Step]]]") -> Iterator[Step]:
        """The iterator; `itself` refers to it."""
        self._move(self._after)
        names = [source.name for source in self.mixture.sources]
        watch = TargetWatch(names, self._plan.sizes, self._after, self._planner.first.step)
        # Only images are counted: other arrays are as large in every step.
        size = None if self._extras.media is None else _image_bytes
        plan_next, ahead = self._planner.next, None
        if self._fetching and not self._fetching.hold_all():
            ahead = self._ahead = self._fetching.ahead(self._planner.next, self._filling.own_rows)
            plan_next = ahead.next
        run = self._run = StepPipeline(
            plan_next,
            self._filling.step,
            self.loader_settings.threads,
            self.loader_settings.prefetch,
            size,
            self.loader_settings.prefetch_bytes,
        )
        try:
            while (item := run.next()) is not None:
                plan, step = item
                self._filling.sum_weights(step)
                watch.see(plan.after, step.loss_denominators)
                self._after, self._giver = plan.after, itself[0]
                self._skipped, self._untrained = plan.skipped, plan.untrained
                yield step
            self._fetching.let_go()
            watch.end()
        finally:
            # What was planned ahead and not taken is forgotten when the loader is used again.
            run.stop()
            if ahead is not None:
                ahead.stop()
            self._fetching.report()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled are settings and state; datasets are opened again where it is unpickled.

        Raises:
            ConfigError: It has a companion, which may hold what belongs to this process.
            StateError: An iterator of it is held, as in `state_dict`.
        """
        if self.companion is not None:
            raise ConfigError(
                "a Loader with a companion (for a teacher, say) cannot be pickled; make it in "
                "the process that uses it"
            )
        return _unpickled, (self.mixture, self.loader_settings.elsewhere(), self.state_dict())

    def __repr__(self) -> str:
        settings, data_parallel = self.settings, self.data_parallel
        dropped = "".join(
            f", {what}: {', '.join(f'{count:,} of {name}' for name, count in counts.items())}"
            for what, counts in (
                ("documents dropped", self.dropped),
                ("untrained parts left out", self.untrained),
            )
            if counts
        )
        return (
            f"Loader({', '.join(source.name for source in self.mixture.sources[:8])}: steps "
            f"of {settings.ramp} rows of {settings.sequence_length} tokens, at step "
            f"{self.step}, rank {data_parallel.rank} of {data_parallel.size}{dropped})"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: how steps are made, and what flows into them."""
        settings = self.settings
        facts = [
            ("step", f"{settings.ramp} rows of {settings.sequence_length:,} tokens"),
            ("packing", settings.packing_text),
            ("next step", self.step),
            ("rank", f"{self.data_parallel.rank} of {self.data_parallel.size}"),
        ]
        sources = [
            (
                source.name,
                f"{source.share:g}",
                type(source.objective).__name__,
                source.max_epochs or "no limit",
            )
            for source in self.mixture.sources
        ]
        return card(
            "Loader", facts, table(("source", "share", "objective", "epochs at most"), sources)
        )

    @property
    def dropped(self) -> dict[str, int]:
        """Source → documents dropped so far, through the window of rows that the last step ended
        in.

        They have no tokens, or are longer than a row (or `max_document_tokens`) in a source with
        `too_long="drop"`. Sources without any are not listed.
        """
        counts = (self._skipped["empty"] + self._skipped["dropped"]).tolist()
        return {
            source.name: count
            for source, count in zip(self.mixture.sources, counts, strict=True)
            if count
        }

    @property
    def untrained(self) -> dict[str, int]:
        """Source → parts of documents left out so far because loss weights leave no target in them,
        counted likewise.

        They are of documents longer than a row (or `max_document_tokens`) in a source with
        `drop_untrained`; a document that is truncated counts as one part. Sources without any are
        not listed.
        """
        counts = [] if self._untrained is None else self._untrained["parts"].tolist()
        return {
            source.name: count
            for source, count in zip(self.mixture.sources, counts, strict=False)
            if count
        }

    @property
    def step(self) -> int:
        """Number of the step that comes next."""
        return self._after.step

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Source name → bytes fetched and used so far by this process, of each source in an object
        store.
        """
        return self._fetching.traffic

    @property
    def companion(self) -> Companion | None:
        """What else is made of each row."""
        return self.loader_settings.companion

    @property
    def needs_isolation(self) -> bool:
        """Whether its rows hold several documents that must not see each other."""
        return self.settings.needs_isolation(self.requirements.attention)

    @property
    def bidirectional_source(self) -> str | None:
        """Name of the first source with an objective that makes bidirectional prefixes; None where
        there is none.
        """
        pairs = zip(self.mixture.sources, self._plan.rewritings, strict=True)
        return next((source.name for source, rewriting in pairs if rewriting.bidirectional), None)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """The objective of each source, resolved."""
        return tuple(rewriting.objective for rewriting in self._plan.rewritings)

    @property
    def own_targets_source(self) -> str | None:
        """Name of the first source with an objective that writes targets of its own; None where
        there is none.
        """
        pairs = zip(self.mixture.sources, self._plan.rewritings, strict=True)
        return next((source.name for source, rewriting in pairs if rewriting.writes_targets), None)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that rows have."""
        return tuple(column.name for column in self._extras.columns)

    @property
    def columns_lacked(self) -> list[tuple[str, str]]:
        """(source, column) where a source has its fill value alone: the column is of another."""
        return self._extras.columns_lacked

    @property
    def blank_image(self) -> BlankImage | None:
        """A blank image as the processor of its sources makes it, for trials of models; None: no
        source has images.
        """
        return None if self._extras.media is None else self._extras.media.blank

    @property
    def path_values(self) -> dict[str, tuple[str, ...] | None]:
        """Source name → names of the values of its paths; None: it has no trees."""
        return dict(
            zip(
                (source.name for source in self.mixture.sources),
                self._extras.path_values,
                strict=True,
            )
        )

    def has_compared(self, source: str) -> bool:
        """Whether any of a source's first documents has a path with a value: answers that are
        better or worse.
        """
        number = [one.name for one in self.mixture.sources].index(source)
        return self._extras.has_compared(number, len(self.datasets[number]))

    @property
    def added_tokens(self) -> dict[str, int]:
        """Source name → the largest token id that its objective adds to documents, where it adds
        any.
        """
        pairs = zip(self.mixture.sources, self._plan.rewritings, strict=True)
        added = {source.name: rewriting.added_tokens for source, rewriting in pairs}
        return {name: max(ids) for name, ids in added.items() if ids}

    def new_plan(self) -> Plan:
        """Its plan from the beginning, for looking at; the loader itself does not move."""
        return Plan(
            self.mixture,
            self.datasets,
            self.settings,
            self.requirements.target_distances or 1,
            self.start,
        )

    def count_steps(self) -> int:
        """Steps up to its end, those before `first_step` among them; costs the whole plan once
        (millions of documents a second).

        Never ends where some source has no `max_epochs`.
        """
        plan = self.new_plan()
        if self._after.known_from:
            plan.restore(self._after.window_start)
        for _ in plan.windows():
            pass
        return self._planner.steps_of(plan.state().row)

    @property
    def known_from(self) -> int:
        """Steps before this one are not those of its plan: its sources had ended there, and got
        more `max_epochs`.
        """
        return self._after.known_from

    def rows_before(self, step: int) -> int:
        """Rows of its plan before a step, over all ranks."""
        return self._planner.row_of(step)

    @property
    def made_from(self) -> dict[str, Any]:
        """What the plan is made from: settings by name, and digests of the sources; states hold
        it.
        """
        return dict(self._description)

    def differences(
        self, first: Mapping[str, Any], other: Mapping[str, Any], where: str
    ) -> list[str]:
        """In what `made_from` of rank 0 and that of a process elsewhere differ, in words; empty: in
        nothing.
        """
        return states.differences(
            self._plan,
            dict(first),
            dict(other),
            lambda name, one, two: f"{name} is {one!r} on rank 0, {two!r} on {where}",
        )

    def state_dict(self) -> dict[str, Any]:
        """State of a loader at rest: after the last step that was handed out, as that step's
        `resume_state`.

        Refused while an iterator is held that gave a step, even at its end: who holds it may have
        taken steps that are not trained yet (Lightning takes one ahead), and a resume would leave
        them out. The state to save in a loop is `step.resume_state` of the last step that was
        trained. An iterator is given up when a `for` loop ends or is left, and when the loader is
        moved (`seek`, `load_state_dict`) or iterated again.

        Raises:
            StateError: Such an iterator is held.
        """
        if self._giver is not None and self._giver() is not None:
            raise StateError(
                "state_dict() of a Loader with an iterator under way, after step "
                f"{self.step - 1}: whoever iterates may have taken steps that are not trained "
                "yet, which a resume would leave out; save `step.resume_state` of the last "
                "step that was trained"
            )
        return states.save(self._description, self._epochs, self._after)

    def load_state_dict(
        self, state: dict[str, Any], *, say: Callable[[str], None] | None = None
    ) -> None:
        """Go on after the step that `state` was saved from, on any number of ranks that divides the
        step.

        Only `max_epochs` of the sources may be others than then, where that changes no row before
        the state, or where all sources had ended.

        Args:
            state: What `state_dict` or `Step.resume_state` gave.
            say: Called with a sentence for each source that has another `max_epochs`; by default
                rank 0 prints it on standard error.

        Raises:
            StateError: The state was made from other data or settings; the message names them.
        """
        self._move(states.load(self._plan, state, say or self._say))

    def _say(self, sentence: str) -> None:
        if self.data_parallel.rank == 0:
            print(f"penstock: {sentence}", file=sys.stderr)

    def seek(self, step: int) -> Self:
        """Go on at step number `step`, replaying the plan from the nearest known state.

        The replay passes millions of documents a second; a bar is shown when it takes longer than a
        second.

        Raises:
            ConfigError: The sources end before it, or it is not a whole number from 0 on.
        """
        step = step_number(step)
        self._move(self._after)
        try:
            with replay_progress(
                "replaying the plan", enabled=self.data_parallel.rank == 0
            ) as watch:
                self._after = self._planner.find(step, near=self._after, watch=watch)
        finally:
            self._move(self._after)
        return self

    def explain(self, step: int, row: int | None = None) -> list[PieceOrigin]:
        """Where the tokens of a step come from: source, file, line, epoch and text of every piece
        of its rows.

        Costs a replay of the plan from the nearest known state; the loader itself does not move.

        Args:
            step: Number of the step.
            row: Number of a row in the whole step (over all ranks); all rows when None.
        """
        step, row = step_number(step), None if row is None else whole("row", row)
        plan = self.new_plan()
        planner = StepPlanner(plan, self.data_parallel.size, self._planner)
        with replay_progress("replaying the plan", enabled=self.data_parallel.rank == 0) as watch:
            planner.start(planner.find(step, near=self._after, watch=watch))
        step_plan = planner.next()
        return (
            []
            if step_plan is None
            else explain(self.mixture, self.datasets, plan.rewritings, step_plan, row)
        )

    def _move(self, state: StepState) -> None:
        """Make `state` the current one; an iterator that works ahead ends, and says so when it is
        asked again.
        """
        if self._run is not None:
            self._run.stop()
            if self._ahead is not None:
                self._ahead.stop()
            self._run.join()
            if self._ahead is not None:
                self._ahead.join()
            self._run = self._ahead = None
            self._fetching.let_go()
        self._after, self._giver = state, None
        self._skipped, self._untrained = state.window_start.skipped, state.window_start.untrained
        self._planner.start(state)


def _unpickled(mixture: Mixture, settings: LoaderSettings, state: dict[str, Any]) -> Loader:
    loader = Loader.of(mixture, settings)
    loader.load_state_dict(state)
    return loader


def _image_bytes(step: Step) -> int:
    return max(1, step._rows.image_bytes)
