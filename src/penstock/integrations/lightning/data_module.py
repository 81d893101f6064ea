"""Lightning: a data module whose batches are a loader's steps, with state, ranks and validation.

```python
class Model(L.LightningModule):
    def training_step(self, step, batch_idx):
        loss = ps.huggingface.loss(self.model, step, step.loss_denominator)
        return self.trainer.datamodule.scaled(loss)

data = ps.lightning.LoaderDataModule(
    lambda ranks: ps.Loader("data/web", sequence_length=4096, rows_per_step=64, data_parallel=ranks)
)
L.Trainer(max_steps=1000, strategy="ddp").fit(Model(), data, ckpt_path="last")
```

A batch of Lightning is this rank's `Step` of the loader; its optimiser steps once for each.
Checkpoints hold the place after the last batch that was *trained*, whatever was fetched, also those
that Lightning writes after an exception. It goes on from its own count of batches, so states are
kept by that count.

Importing it needs lightning. The classes of the package `pytorch_lightning` are other ones, which
do not take it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from penstock.core.errors import ConfigError, DistributedError, MissingExtraError, StateError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.plan.loader import Step
from penstock.plan.loader.agreement import check_ranks
from penstock.plan.loader.data_parallel import DataParallel
from penstock.plan.loader.loader import Loader

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise MissingExtraError("lightning") from error

Given = Loader | Callable[[DataParallel], Loader]
"""A loader that was made for this process, or a function that makes it once Lightning knows the
ranks.
"""

_KEPT = 4
"""States around the last trained batch that are kept; Lightning fetches at most one batch ahead."""


class LoaderDataModule(pl.LightningDataModule):  # type: ignore[misc]
    """A loader's steps as Lightning's batches.

    Lightning's limits count steps: `max_steps`, `limit_train_batches`, `fast_dev_run`. One of its
    epochs goes to the end of `train`, or as far as `limit_train_batches`; the next goes on after
    it. Passes over the data are `Source(max_epochs=…)`; a run that asks for more steps than the
    sources have is refused.

    Args:
        train: The training data: a function of the ranks, since Lightning starts its processes
            after your script has made its objects; or a loader, if it was made for the rank that
            this process has.
        val: The data for validation: a loader that ends (`max_epochs=1`), or several; each
            validation is a whole pass.

    Raises:
        ConfigError: Settings of Lightning's Trainer contradict the loader; at `setup` or the first
            batch.
        DistributedError: A loader is for another rank, or number of ranks, than Lightning's.
    """

    def __init__(self, train: Given, val: Given | Sequence[Given] | None = None) -> None:
        super().__init__()
        for given in (train, *_several(val)):
            if not isinstance(given, Loader) and not callable(given):
                raise ConfigError(
                    "LoaderDataModule: expected a penstock.Loader, or a function of the "
                    f"ranks that makes one; got {given!r}"
                )
        self._given, self._given_val = train, _several(val)
        self._one_val = val is not None and not isinstance(val, Sequence)
        if val is None:
            # Lightning validates if this is another method than its own.
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]
        self._train: Loader | None = None
        self._val: list[_Pass] = []
        self._begin: JsonObject = {}
        self._states: dict[int, JsonObject] = {}
        self._count: int | None = None

    # -- what a training step needs
    # ------------------------------------------------------------------------------------

    @property
    def ranks(self) -> DataParallel:
        """This process among those that get different rows, as Lightning's strategy has them."""
        trainer = self._trainer()
        found = trainer.distributed_sampler_kwargs
        return (
            DataParallel()
            if found is None
            else DataParallel(int(found["rank"]), int(found["num_replicas"]))
        )

    @property
    def loader(self) -> Loader:
        """The training loader of this process.

        Raises:
            StateError: Lightning has not set it up yet.
        """
        if self._train is None:
            raise StateError(
                "LoaderDataModule: the loader is made when Lightning calls setup, in Trainer.fit"
            )
        return self._train

    def scaled(self, loss: Any) -> Any:
        """A loss divided by `step.loss_denominator`, times the ranks over which strategies average
        gradients.

        The mean of it over ranks is the loss of the step: `self.log("loss", …, sync_dist=True)`.
        """
        return loss * self.ranks.size

    # -- what Lightning calls
    # ------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Make the loaders, once Lightning knows the ranks."""
        _refuse_settings(self._trainer())
        if self._train is None or self._train.data_parallel != self.ranks:
            train = self._made(self._given, "train")
            held_out = [self._made(given, "val") for given in self._given_val]
            if any(each is train for each in held_out):
                raise ConfigError(
                    "LoaderDataModule: the loader of val is also that of train; make another one"
                )
            if any(_endless(each) for each in held_out):
                raise ConfigError(
                    "LoaderDataModule: a loader of val never ends; set max_epochs=1 for its sources"
                )
            self._train, self._begin, self._count = train, train.state_dict(), None
            self._val = [_Pass(each) for each in held_out]
        if not self._trained():
            # Of an earlier Trainer. A checkpoint's state is loaded after this.
            self._states = {}

    def train_dataloader(self) -> Any:
        """This rank's steps."""
        return _TrainSteps(self)

    def val_dataloader(self) -> Any:
        """One pass over each loader of `val`."""
        return self._val[0] if self._one_val else self._val

    def state_dict(self) -> JsonObject:
        """Called by Lightning for each checkpoint: the place after the last batch that was trained.

        Raises:
            StateError: Lightning counts another number of batches than were given out.
        """
        trained, _ = self._trained(), self.loader
        return {"trained": trained, "loader": json.dumps(self._state_after(trained))}

    def load_state_dict(self, state_dict: JsonObject) -> None:
        """Called by Lightning when it resumes.

        Raises:
            StateError: The state was made from other data or settings.
        """
        try:
            trained, state = int(state_dict["trained"]), json.loads(state_dict["loader"])
        except (LookupError, TypeError, ValueError) as error:
            raise StateError(
                f"this checkpoint has no state of a LoaderDataModule ({error!r})"
            ) from error
        self.loader.load_state_dict(state)
        self._states = {trained: state}

    # -- steps
    # ----------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """The steps after those that Lightning has trained; Lightning calls it through
        `train_dataloader`.
        """
        begin = taken = self._trained()
        self._states = {taken: self._state_after(taken)}
        self.loader.load_state_dict(self._states[taken])
        self._refuse_shortage(taken)
        for step in self.loader:
            _refuse_settings(self._trainer())
            taken += 1
            self._states[taken] = step.resume_state
            self._states.pop(taken - _KEPT, None)
            yield step
        if taken == begin:
            # Lightning would begin one empty epoch after another.
            raise ConfigError(
                f"Lightning asks for a batch after {taken}, but the sources have ended; lower "
                "max_steps or max_epochs, or give the sources more max_epochs"
            )

    def count(self) -> int:
        """Batches of the whole run, those included that were trained before a resume.

        Raises:
            TypeError: The sources never end. Lightning then takes its other way, with one batch
                fetched ahead.
        """
        if _endless(self.loader):
            raise TypeError("the sources have no max_epochs, so they never end")
        if self._count is None:
            self._count = self.loader.count_steps()
        # Lightning counts from 0, wherever the loader was when it was given.
        return self._count - self._steps_before()

    def _steps_before(self) -> int:
        """Steps of the loader before Lightning's batch 0."""
        trained = self._trained()
        return int(self._state_after(trained)["step"]) - trained

    def _trained(self) -> int:
        """Batches that Lightning has trained: counted after the optimiser's step and before its
        hooks.
        """
        return int(self._trainer().fit_loop.epoch_loop.batch_progress.total.processed)

    def _state_after(self, trained: int) -> JsonObject:
        if trained in self._states:
            return self._states[trained]
        if not trained:
            # A new Trainer begins where the loader was given to this module.
            return self._begin
        known = ", ".join(map(str, sorted(self._states))) or "none"
        raise StateError(
            f"Lightning has trained {trained} batches, but the loader's place after these is "
            f"not known (known: {known}); resume from a checkpoint that was written with this "
            "LoaderDataModule, and let no other callback change Lightning's count of batches"
        )

    def _refuse_shortage(self, trained: int) -> None:
        """Refuse more epochs or steps than the sources have: Lightning would end early, or
        never.
        """
        trainer = self._trainer()
        try:
            available = self.count()
        except TypeError:
            return
        epochs, most = trainer.max_epochs, trainer.max_steps
        each = min(available, trainer.num_training_batches)
        by_epochs = float("inf") if epochs in (None, -1) else epochs * each
        # Lightning counts the steps of all optimisers.
        by_steps = float("inf") if most == -1 else -(-most // max(1, len(trainer.optimizers)))
        if min(by_epochs, by_steps) > available:
            asked = (
                f"max_steps={most}"
                if by_steps < by_epochs
                else f"max_epochs={epochs} of {each} batches"
            )
            raise ConfigError(
                f"Lightning's Trainer: {asked}, but the sources end after {available} steps. "
                "Passes over the data are Source(max_epochs=…) of the loader, which one "
                "epoch of Lightning contains: set max_epochs=1, or a limit_train_batches "
                "that divides the steps among more epochs"
            )

    def _trainer(self) -> Any:
        if self.trainer is None:
            raise StateError(
                "LoaderDataModule: it has no Trainer yet; pass it to Trainer.fit(model, datamodule)"
            )
        return self.trainer

    def _made(self, given: Given, name: str) -> Loader:
        ranks = self.ranks
        loader = given if isinstance(given, Loader) else given(ranks)
        if not isinstance(loader, Loader):
            raise ConfigError(
                f"LoaderDataModule: the function of {name} must return a penstock.Loader, got "
                f"{loader!r}"
            )
        found = loader.data_parallel
        if found != ranks:
            raise DistributedError(
                f"LoaderDataModule: the loader of {name} is for rank {found.rank} of "
                f"{found.size}, but Lightning has rank {ranks.rank} of {ranks.size} here; "
                "give a function: lambda ranks: penstock.Loader(…, data_parallel=ranks)"
            )
        check_ranks(loader)
        return loader


@final
class _TrainSteps:
    """What Lightning iterates in training. It looks for `state_dict`; the state itself is the data
    module's.
    """

    def __init__(self, data: LoaderDataModule) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Step]:
        return self._data.steps()

    def __len__(self) -> int:
        return self._data.count()

    def state_dict(self) -> JsonObject:
        return {}

    def load_state_dict(self, state: JsonMapping) -> None:
        pass


@final
class _Pass:
    """A pass over a loader from where it was given, whenever it is iterated."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._begin = loader, loader.state_dict()
        self._count: int | None = None

    def __iter__(self) -> Iterator[Step]:
        self._loader.load_state_dict(self._begin)
        yield from self._loader

    def __len__(self) -> int:
        if self._count is None:
            self._count = self._loader.count_steps() - int(self._begin["step"])
        return self._count


def _several(given: Given | Sequence[Given] | None) -> list[Given]:
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) else [given]


def _endless(loader: Loader) -> bool:
    return any(source.max_epochs is None for source in loader.mixture.sources)


def _refuse_settings(trainer: Any) -> None:
    """Refuse settings of Lightning's Trainer that cannot be right with steps as batches."""
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            "Lightning's Trainer: accumulate_grad_batches is "
            f"{trainer.accumulate_grad_batches}, but a batch is already all that an "
            "optimiser's step trains: Lightning would divide its loss again, and a "
            "checkpoint would lie between batches of a step; leave it at 1, set "
            "Loader(rows_per_step=…), and go through the rows of a step one by one (manual "
            "optimization)"
        )
    if trainer.overfit_batches:
        raise ConfigError(
            f"Lightning's Trainer: overfit_batches is {trainer.overfit_batches}, but each of "
            "its epochs goes on with the steps after those of the last; use a small dataset "
            "with Source(max_epochs=…) instead"
        )
