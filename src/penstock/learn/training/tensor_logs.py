"""Log tensors of a step for debugging: parameters, gradients and outputs of modules, selected by
name patterns.

    RUN/tensors/statistics.jsonl             one line per tensor: mean, std, min, max, norm, share that is not finite
    RUN/tensors/step-00000100.safetensors    the tensors themselves, if requested

Names are those of torch: `blocks.0.mlp.up.weight` is a parameter, `grad.blocks.0.mlp.up.weight` its
gradient, summed over the step and before clipping, and `out.blocks.0.mlp` the output of that module
for the first row of the step. Only a logged step has a cost: its hooks exist only during the step
(a compiled model is recompiled for it).
"""  # noqa: E501

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.data.stores.files import usual_mode
from penstock.learn.training.checkpoints import output_errors
from penstock.learn.training.metrics import JsonLines
from penstock.learn.training.run_folder import TENSORS
from penstock.learn.training.settings import TensorLogSettings

STATISTICS = "statistics.jsonl"


@final
class TensorLogs:
    """Writes the tensors of every n-th step.

    ```python
    with logs.watch(step):         # number of steps done after this one
        ...                        # forward and backward passes of the step; then, outside, the optimizer
    ```

    Args:
        run: The run's folder.
        model: The model to watch.
        settings: Which tensors, at which steps, and whether in full.
        done: Steps that are done already; lines of later steps are removed.
        writes: Whether this process writes; with several processes rank 0 writes, and all must
            watch.

    Raises:
        ConfigError: A pattern matches no name.
        OutputError: The folder cannot be written.
    """  # noqa: E501

    def __init__(
        self,
        run: Path,
        model: nn.Module,
        settings: TensorLogSettings,
        *,
        done: int = 0,
        writes: bool = True,
    ) -> None:
        self._folder, self._model, self._settings = run / TENSORS, model, settings
        check_patterns(model, settings)
        self._lines = (
            JsonLines(self._folder / STATISTICS, done) if settings.patterns and writes else None
        )

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """At a step to log: record the modules' outputs in the body, and write them with parameters
        and gradients.
        """
        if not self._settings.patterns or step % self._settings.every:
            yield
            return
        seen: dict[str, Tensor] = {}
        hooks = [
            module.register_forward_hook(_keeper(seen, f"out.{name}"))
            for name, module in self._model.named_modules()
            if name and self._wanted(f"out.{name}")
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for name, p in self._model.named_parameters():
            if self._wanted(name):
                seen[name] = _whole(p.detach())
            if p.grad is not None and self._wanted(f"grad.{name}"):
                seen[f"grad.{name}"] = _whole(p.grad)
        self._write(step, seen)

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()

    def _wanted(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._settings.patterns)

    def _write(self, step: int, seen: dict[str, Tensor]) -> None:
        if self._lines is None:
            return
        for name, tensor in seen.items():
            self._lines.see({"step": step, "name": name, **statistics(tensor)})
        if self._settings.full:
            with output_errors(self._folder):
                # Clones, because safetensors refuses tensors that share memory.
                whole = {name: tensor.cpu().clone().contiguous() for name, tensor in seen.items()}
                path = self._folder / f"step-{step:08d}.safetensors"
                save_file(whole, path)
                usual_mode(path)


def check_patterns(model: nn.Module, settings: TensorLogSettings) -> None:
    """Refuse a pattern that matches no name.

    Raises:
        ConfigError: One matches none.
    """
    names = _names(model)
    for pattern in settings.patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"tensor_logs.patterns: {pattern!r} fits no tensor; there are, among others, "
                f"{', '.join(names[:: max(1, len(names) // 6)])}"
            )


@torch.no_grad()
def statistics(tensor: Tensor) -> JsonObject:
    """Shape, dtype, share of numbers that are not finite (`not_finite`), and figures of the others;
    None if none.
    """
    numbers = tensor.detach().flatten()
    numbers = numbers.double() if numbers.device.type == "cpu" else numbers.float()
    finite = numbers[torch.isfinite(numbers)]
    found: JsonObject = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "not_finite": (len(numbers) - len(finite)) / max(1, len(numbers)),
    }
    if not len(finite):
        return found | dict.fromkeys(("mean", "std", "min", "max", "norm"))
    figures = (finite.mean(), finite.std(correction=0), finite.min(), finite.max(), finite.norm())
    return found | dict(
        zip(("mean", "std", "min", "max", "norm"), map(float, figures), strict=True)
    )


def _names(model: nn.Module) -> list[str]:
    parameters = [name for name, _ in model.named_parameters()]
    gradients = [f"grad.{name}" for name, p in model.named_parameters() if p.requires_grad]
    return parameters + gradients + [f"out.{name}" for name, _ in model.named_modules() if name]


def _keeper(seen: dict[str, Tensor], name: str) -> object:
    """A hook that keeps the first tensor of a module's first output."""

    def keep(module: nn.Module, inputs: object, output: Any) -> None:
        first = (
            output
            if isinstance(output, Tensor)
            else next((x for x in output if isinstance(x, Tensor)), None)
        )
        if name not in seen and first is not None:
            seen[name] = _whole(first.detach()).clone()

    return keep


def _whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered if it is sharded."""
    full = getattr(tensor, "full_tensor", None)
    whole: Tensor = tensor if full is None else full()
    return whole
