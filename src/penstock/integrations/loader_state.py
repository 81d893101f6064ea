"""The place of a loader in the checkpoints of other people's loops: after the last step that was
trained.

A loader alone cannot know that place: whoever iterates it may have taken steps that are not trained
yet. `LoaderState` knows it, because the loop says so. It has the methods that checkpoints of all
kinds look for: `state_dict` and `load_state_dict`, as in `torch.distributed.checkpoint` (its
`Stateful`), Accelerate and Lightning Fabric.

The state holds for any number of ranks that divides the step, and is the same on all of them. Does
not need torch.

Where torch.distributed has begun, ranks compare what their plans are made from before the first
step.
"""

import json
from collections.abc import Iterator
from typing import Literal, final

from penstock.core.errors import ConfigError, StateError
from penstock.core.json_values import JsonObject
from penstock.plan.loader import Step
from penstock.plan.loader.agreement import check_ranks, store_gather
from penstock.plan.loader.loader import Loader

KEY = "penstock_loader"
"""The only key of a state."""

Trained = Literal["marked", "yielded"]


@final
class LoaderState:
    """A loader in a loop of your own, with the state to save.

    ```python
    place = ps.integrations.LoaderState(loader)
    torch.distributed.checkpoint.load({"model": model, "loader": place}, checkpoint_id="checkpoint")    # to resume
    for step in place:
        train(step)
        place.trained(step)
        torch.distributed.checkpoint.save({"model": model, "loader": place}, checkpoint_id="checkpoint")
    ```

    Each step must be marked before the next one is taken from it. A loop that takes steps ahead
    iterates the loader itself, and marks steps in order when it has trained them.

    Args:
        loader: The loader.
        trained: "marked": the state is that after the last step given to `trained`. "yielded":
            after the last step that was taken, as torchdata's StatefulDataLoader does; for trainers
            that take no step ahead, and save between two steps only.

    Raises:
        ConfigError: It is no loader, or `trained` is something else.
        StateError: The loader is under way in an iterator; see `Loader.state_dict`.
    """  # noqa: E501

    def __init__(self, loader: Loader, *, trained: Trained = "marked") -> None:
        if not isinstance(loader, Loader):
            raise ConfigError(f"LoaderState: expected a penstock.Loader, got {loader!r}")
        if trained not in ("marked", "yielded"):
            raise ConfigError(
                f"LoaderState: trained is {trained!r}; expected 'marked' or 'yielded'"
            )
        self.loader, self._marks = loader, trained == "marked"
        self._state = loader.state_dict()
        self._next = self._taken = loader.step
        self.agreed = loader.data_parallel.size == 1
        """Whether the ranks have compared their data and settings; alone with its rows, a process
        has nobody to ask.
        """

    def __repr__(self) -> str:
        return f"LoaderState({self._next} steps trained, {self.loader!r})"

    def __iter__(self) -> Iterator[Step]:
        """Steps after the last one that was trained.

        Raises:
            StateError: While iterating: the step before was not marked as trained, or the loader
                was moved.
            ConfigError: At the first step: a rank has other data or settings.
        """
        if not self.agreed:
            check_ranks(self.loader, store_gather(self.loader.data_parallel, "LoaderState"))
            self.agreed = True
        if self.loader.step not in (self._next, self._taken):
            raise StateError(
                f"the loader was moved to step {self.loader.step}, and this LoaderState is at "
                f"step {self._next}; move it by load_state_dict of the LoaderState, or make a "
                "new one"
            )
        # A step that was taken and not trained, by an iterator that was given up, comes again.
        self.loader.load_state_dict(self._state)
        for step in self.loader:
            self._taken = step.index + 1
            if not self._marks:
                self.trained(step)
            yield step
            if self._next != step.index + 1:
                raise StateError(
                    f"the next step was asked for, but step {step.index} is not marked as "
                    "trained, so a checkpoint would resume before it: call trained(step) "
                    "after the optimizer's step"
                )

    def trained(self, step: Step) -> None:
        """The optimizer has made its step with this one; a checkpoint from now on resumes after it.

        Raises:
            StateError: Another step comes next: one was left out, or trained twice.
        """
        if step.index != self._next:
            raise StateError(
                f"step {step.index} is marked as trained, but step {self._next} comes next; "
                "mark each step once, in order; if you moved the loader yourself (seek, "
                "load_state_dict), make a new LoaderState"
            )
        self._state, self._next = step.resume_state, step.index + 1

    def state_dict(self) -> dict[str, str]:
        """The state after the last trained step: one text, so that checkpoints of all kinds keep it
        as it is.
        """
        return {KEY: json.dumps(self._state)}

    def load_state_dict(self, state: JsonObject) -> None:
        """Go on after the step that `state` was saved after.

        Raises:
            StateError: It is no state of a `LoaderState`, or was made from other data or settings.
        """
        try:
            found = json.loads(state[KEY])
        except (LookupError, TypeError, ValueError) as error:
            raise StateError(
                f"this is not the state of a penstock LoaderState ({error!r}); give what its "
                "state_dict() returned"
            ) from error
        self.loader.load_state_dict(found)
        self._state, self._next = found, self.loader.step
        self._taken = self._next
