"""The recurrent operations of a model, each computed by the package that the user named for it, or
by torch.

Nothing is taken because it happens to be installed: without a name, all operations are ours in
torch. `used` says what computed each of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.models.recurrent import convolution, delta_rule, state_space
from penstock.models.recurrent.borders import Borders
from penstock.models.recurrent.packages import PACKAGES, Package


@final
class Operations:
    """Recurrent operations over packed rows, with a package behind some of them.

    Attributes:
        backends: Names of the packages, in the order in which they are asked; empty: torch computes
            all.
        used: Operation → the backends that computed it so far; empty without packages.
    """

    def __init__(
        self,
        packages: Sequence[Package] = (),
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.backends = tuple(package.name for package in packages)
        self.used: dict[str, set[str]] = {}
        self._packages, self._device, self._dtype = tuple(packages), device, dtype

    @classmethod
    def of(
        cls, backends: Sequence[str], *, device: torch.device | str, dtype: torch.dtype
    ) -> "Operations":
        """Operations by the named backends; each takes the first that provides it, or torch.

        Args:
            backends: Names of `PACKAGES`, or torch.
            device: The model's device.
            dtype: The dtype in which the model computes.

        Raises:
            ConfigError: A name is unknown, or the package is missing or cannot compute there.
        """
        names, packages = list(backends), []
        if names and names[-1] == "torch":
            names.pop()
        for name in names:
            if name == "torch":
                raise ConfigError(
                    f"recurrent backends {list(backends)}: torch provides all operations; put "
                    "it last"
                )
            if name not in PACKAGES:
                raise ConfigError(
                    f"recurrent backend {name!r} is unknown; known: torch, {', '.join(PACKAGES)}"
                )
            if (reason := PACKAGES[name].refusal(torch.device(device), dtype)) is not None:
                raise ConfigError(
                    f"recurrent backend {name!r} {reason}; or take 'torch', which runs everywhere"
                )
            packages.append(PACKAGES[name])
        return cls(packages, torch.device(device).type, dtype)

    def describe(self) -> str:
        """Backend of each operation so far, in words."""
        if not self._packages:
            return "torch"
        return ", ".join(
            f"{name} by {' and '.join(sorted(self.used[name]))}" for name in sorted(self.used)
        )

    @property
    def idle(self) -> list[str]:
        """Named backends that computed nothing so far."""
        return [
            name for name in self.backends if not any(name in used for used in self.used.values())
        ]

    def causal_convolution(
        self,
        row: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        borders: Borders,
        state: Tensor | None = None,
    ) -> Tensor:
        """As `convolution.causal_convolution`. States are slots before the documents, for every
        package.
        """
        if (function := self._package("causal_convolution", row)) is None:
            return convolution.causal_convolution(row, weight, bias, borders, state)
        if state is None:
            out: Tensor = function(row, weight, bias, borders, self._dtype)
            return out
        wider, among, real = convolution.behind_state(row, borders, state)
        found: Tensor = function(wider, weight, bias, among, self._dtype)[real]
        return found

    def gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        borders: Borders,
        state: Tensor | None = None,
        keeps: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """As `delta_rule.gated_delta_rule`; where nobody `keeps` them, states after the documents
        may be None.
        """
        function = self._package(
            "kimi_delta_rule" if log_decay.ndim == 3 else "gated_delta_rule", q
        )
        if function is None:
            return delta_rule.gated_delta_rule(q, k, v, log_decay, beta, borders, state, keep=keeps)
        out, after = function(q, k, v, log_decay, beta, borders, state, self._dtype)
        return out, after

    def state_space_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        borders: Borders,
        state: Tensor | None = None,
        keeps: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """As `state_space.state_space_scan`; where nobody `keeps` them, states after the documents
        may be None.

        With states, torch computes: no package has those of several documents.
        """
        function = self._package("state_space_scan", x, states=keeps or state is not None)
        if function is None:
            return state_space.state_space_scan(x, dt, a, b, c, borders, state, keep=keeps)
        return function(x, dt, a, b, c, borders, self._dtype), None

    def selective_scan(
        self,
        u: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        borders: Borders,
        state: Tensor | None = None,
        keeps: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """As `state_space.selective_scan`, with states as in `state_space_scan`."""
        function = self._package("selective_scan", u, states=keeps or state is not None)
        if function is None:
            return state_space.selective_scan(u, dt, a, b, c, borders, state, keep=keeps)
        return function(u, dt, a, b, c, borders, self._dtype), None

    def _package(
        self, operation: str, given: Tensor, states: bool = False
    ) -> Callable[..., Any] | None:
        """The package's function for an operation; None: torch computes it."""
        if not self._packages:
            return None
        package = next(
            (one for one in self._packages if operation in one.operations and not states), None
        )
        self.used.setdefault(operation, set()).add("torch" if package is None else package.name)
        if package is None:
            return None
        if given.device.type != self._device:
            raise ConfigError(
                f"recurrent backend {package.name!r} was chosen for a model on "
                f"{self._device}, which now is on {given.device.type}; choose again: "
                "use_recurrent(model, …)"
            )
        return package.operations[operation]


TORCH = Operations()
"""All in torch; what models have until a backend is named."""
