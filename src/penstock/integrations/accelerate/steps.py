"""Accelerate: a loader's steps in a loop with an `Accelerator`, with state, ranks and the loss of
the whole step.

```python
data = ps.accelerate.AcceleratorSteps(accelerator, loader)  # registered: save_state and load_state include its place
model, optimizer = accelerator.prepare(model, optimizer)    # the loader needs no preparing: it has this rank's rows
for step in data:
    for row in data.rows(step, model):                      # gradients are exchanged with the last
        data.backward(ps.huggingface.loss(model, row, step.loss_denominator))
    optimizer.step()
    optimizer.zero_grad()
    data.trained(step)
    accelerator.save_state("checkpoint")                    # and load_state, before the loop
```

Accelerate divides each loss by its `gradient_accumulation_steps`, and averages gradients over
ranks. The loss of a step is a sum that is already divided, so the first must be 1, and `backward`
undoes the second. Do not wrap a loader in a torch `DataLoader` to prepare that: Accelerate would
share out its rows among the ranks a second time.

Importing it needs accelerate.
"""  # noqa: E501

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, final

from penstock.core.errors import ConfigError, DistributedError, MissingExtraError
from penstock.integrations.loader_state import LoaderState
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.loader import Step
from penstock.plan.loader.agreement import check_ranks
from penstock.plan.loader.loader import Loader

try:
    from accelerate import Accelerator
except ImportError as error:
    raise MissingExtraError("accelerate", "huggingface") from error

_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "XLA")
"""Kinds of processes where something else than the loop decides when the optimizer steps, or scales
losses.
"""


@final
class AcceleratorSteps:
    """A loader's steps, for a loop with an `Accelerator`; `save_state` and `load_state` include
    their place.

    Args:
        accelerator: The accelerator.
        loader: The loader, made for this process: data_parallel=(accelerator.process_index,
            accelerator.num_processes).

    Raises:
        ConfigError: The accelerator accumulates gradients by itself, or runs in a way whose loss
            would be another one.
        DistributedError: The loader is for another rank, or number of ranks.
    """

    def __init__(self, accelerator: Accelerator, loader: Loader) -> None:
        self._accelerator, self._place = accelerator, LoaderState(loader)
        self._check()
        check_ranks(loader)
        self._place.agreed = True
        accelerator.register_for_checkpointing(self)

    def __repr__(self) -> str:
        return f"AcceleratorSteps({self._place.loader!r})"

    def __iter__(self) -> Iterator[Step]:
        """Steps after the last one that was trained; each must be marked by `trained` before the
        next.
        """
        self._check()
        yield from self._place

    def rows(
        self, step: Step, *models: object, rows_per_pass: int = 1
    ) -> Iterator[Sequence[ModelInput]]:
        """This rank's rows of a step, a few at a time; the gradients of all are exchanged with
        those of the last.

        Args:
            step: A step of this loader.
            models: The prepared models that are trained; without them, gradients are exchanged each
                time.
            rows_per_pass: Rows of one forward pass.
        """
        if rows_per_pass < 1:
            raise ConfigError(
                f"AcceleratorSteps.rows: rows_per_pass must be at least 1, got {rows_per_pass}"
            )
        for begin in range(0, len(step), rows_per_pass):
            with ExitStack() as stack:
                if begin + rows_per_pass < len(step):
                    for model in models:
                        stack.enter_context(self._accelerator.no_sync(model))
                yield step[begin : begin + rows_per_pass]

    def backward(self, loss: Any) -> None:
        """Backward of a loss that was divided by `step.loss_denominator`; its gradients are summed
        over ranks.
        """
        self._check()
        self._accelerator.backward(loss * self._place.loader.data_parallel.size)

    def trained(self, step: Step) -> None:
        """The optimizer has made its step with this one; see `LoaderState.trained`."""
        self._place.trained(step)

    def state_dict(self) -> dict[str, str]:
        """Called by `Accelerator.save_state`: the place after the last trained step."""
        return self._place.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called by `Accelerator.load_state`."""
        self._place.load_state_dict(state)

    def _check(self) -> None:
        accelerator, found = self._accelerator, self._place.loader.data_parallel
        # Whatever sets it: Accelerator(gradient_accumulation_steps=…), the plugin, or `accelerate
        # launch`.
        if accelerator.gradient_accumulation_steps != 1:
            raise ConfigError(
                "the Accelerator has "
                f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps}, by "
                "which it divides each loss, but a loss of penstock is already divided by "
                "the whole step; leave it at 1: Loader(rows_per_step=…) sets the rows of a "
                "step, AcceleratorSteps.rows goes through them"
            )
        if accelerator.distributed_type.name in _ENGINES:
            raise ConfigError(
                f"AcceleratorSteps: {accelerator.distributed_type.name} is not supported: "
                "there the loop does not decide when the optimizer steps; for DeepSpeed, use "
                "penstock.huggingface.Trainer"
            )
        ranks = accelerator.process_index, accelerator.num_processes
        parallel = getattr(accelerator, "parallelism_config", None)
        for name in ("tp_size", "cp_size", "sp_size"):
            if (getattr(parallel, name, 1) or 1) > 1:
                raise DistributedError(
                    f"AcceleratorSteps: processes that share rows are not supported ({name} "
                    "above 1)"
                )
        if (found.rank, found.size) != ranks:
            raise DistributedError(
                f"the loader is for rank {found.rank} of {found.size}, but the Accelerator is "
                f"process {ranks[0]} of {ranks[1]}; make it with "
                "data_parallel=(accelerator.process_index, accelerator.num_processes)"
            )
