"""The optimizers of a model: which optimizer gets which parameter, one step, and the state by
parameter names.

**Master weights.** Parameters are always float32; a model that computes in bfloat16 casts them at
each use (autocast). So the optimizer, its state and the checkpoints hold one copy of the weights,
no small update is lost to bfloat16's 8 bits, and no second copy can drift. The alternative,
bfloat16 parameters with a float32 copy in the optimizer, needs as many bytes and adds one more
source of errors.

**Groups.** Matrices decay. Vectors (norms, biases) never do. Embeddings, and matrices of an
embedding's shape (an untied output matrix), decay only with `decay_embeddings`. Under Muon these
and the vectors use AdamW, as its authors advise.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import ConfigError, StateError
from penstock.learn.training.optimizer_settings import OptimizerSettings
from penstock.models.lora.trained_parts import trained_parts

FUSED_DEVICES = {"cpu", "cuda", "xpu", "mps"}
"""Device types for which torch has a fused AdamW kernel."""


@final
class Optimizers:
    """All optimizers of a model behind one interface.

    ```python
    optimizers = Optimizers(model, settings)
    loss.backward()
    norm = optimizers.step(learning_rate)      # clips, updates, drops the gradients
    ```

    Args:
        model: Its parameters that require gradients are optimized; shard it (`fully_shard`) before.
        settings: See `OptimizerSettings`.
        beside: Further parameters, not of the model, that are optimized with it by AdamW without
            decay.
        together: Whether there are several ranks, with the same weights or with shards of them,
            which step together; Muon's work is then divided among them.

    Raises:
        ConfigError: There is nothing to train, a parameter is not float32 (or float64), or torch
            has no Muon.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        *,
        beside: Mapping[str, nn.Parameter] = MappingProxyType({}),
        together: bool = False,
    ) -> None:
        self.settings = settings
        self._names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices, embeddings, vectors = _kinds(model, self._names)
        self._names |= beside
        vectors += beside.values()
        _check(self._names)
        decayed = embeddings if settings.decay_embeddings else []
        rest = vectors if settings.decay_embeddings else vectors + embeddings
        factors = _factors(self._names, settings.learning_rate_factors)
        self.members: list[torch.optim.Optimizer] = []
        self.fused: bool | None = None
        if settings.kind == "muon":
            groups = _by_factor(matrices, factors, settings.weight_decay)
            self.members += _muon(groups, settings, together=together)
        else:
            decayed = matrices + decayed
        groups = [
            *_by_factor(decayed, factors, settings.weight_decay),
            *_by_factor(rest, factors, 0.0),
        ]
        if groups:
            self.fused = _fused(self._names.values(), settings)
            adamw = torch.optim.AdamW(
                groups, lr=settings.peak, betas=settings.betas, eps=settings.eps, fused=self.fused
            )
            self.members.append(adamw)

    @torch.no_grad()
    def step(self, learning_rate: float) -> Tensor:
        """Clip, update every parameter, and drop the gradients.

        Returns:
            The norm of all gradients before clipping, a scalar on the device. If it is not finite,
            clipping turns gradients into zeros or NaN, and so the update is wrong: check it where
            that matters.
        """
        norm = self.clip()
        for member in self.members:
            for group in member.param_groups:
                group["lr"] = learning_rate * group["factor"]
            member.step()
            member.zero_grad(set_to_none=True)
        return norm

    def clip(self) -> Tensor:
        """Clip gradients to `clip_norm`; return their norm before, over all parameters and
        shards.
        """
        limit = self.settings.clip_norm
        norm = nn.utils.clip_grad_norm_(
            self._names.values(), float("inf") if limit is None else limit
        )
        full = getattr(norm, "full_tensor", None)
        return norm if full is None else full()

    def state_tensors(self) -> dict[str, Tensor]:
        """The state as `parameter name/entry` → tensor (`layers.0.mlp.up.weight/exp_avg`); not
        copied.
        """
        names = {id(p): name for name, p in self._names.items()}
        return {
            f"{names[id(p)]}/{entry}": value
            for member in self.members
            for p, entries in member.state.items()
            for entry, value in entries.items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a state that `state_tensors` gave, from any device.

        Raises:
            StateError: Its parameters are not those of the model.
        """
        entries: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, entry = key.rsplit("/", 1)
            entries.setdefault(name, {})[entry] = value
        if entries and entries.keys() != self._names.keys():
            odd = min(entries.keys() ^ self._names.keys())
            raise StateError(
                f"optimizer state: {odd} is in "
                f"{'the state' if odd in entries else 'the model'} only; resume with the "
                "model and the trainable parameters that the state was saved with"
            )
        names = {id(p): name for name, p in self._names.items()}
        for member in self.members:
            order = [names[id(p)] for group in member.param_groups for p in group["params"]]
            state = {place: entries[name] for place, name in enumerate(order) if name in entries}
            member.load_state_dict(
                {"state": state, "param_groups": member.state_dict()["param_groups"]}
            )

    def fill_state(self) -> None:
        """Create the state that a first step would create, without changing weights; a sharded
        checkpoint is then read into it.
        """
        for p in self._names.values():
            p.grad = torch.zeros_like(p)
        self.step(0.0)


def _check(names: Mapping[str, Tensor]) -> None:
    if not names:
        raise ConfigError("optimizer: no parameter of the model requires a gradient; unfreeze some")
    for name, p in names.items():
        if p.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"optimizer: parameter {name} is {p.dtype}; keep weights in float32 "
                "(`model.float()`) and compute in bfloat16 by autocast, or small updates are "
                "lost"
            )


def _kinds(
    model: nn.Module, names: Mapping[str, nn.Parameter]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(matrices inside the model, embeddings and matrices of their shape, all other parameters)."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    shapes = {table.shape for table in tables}
    rows = {id(part.trained) for _, _, part in trained_parts(model) if part.rows is not None}
    matrices: list[Tensor] = []
    embeddings: list[Tensor] = []
    for p in names.values():
        if p.ndim >= 2:
            (embeddings if p.shape in shapes or id(p) in rows else matrices).append(p)
    return matrices, embeddings, [p for p in names.values() if p.ndim < 2]


def _factors(names: Mapping[str, Tensor], patterns: Mapping[str, float]) -> dict[int, float]:
    """Id of each parameter → factor of its learning rate.

    Raises:
        ConfigError: A pattern fits no trained weight.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"optimizer.learning_rate_factors: {pattern!r} fits no trained weight; there "
                f"are, among others, {', '.join(list(names)[:: max(1, len(names) // 6)])}"
            )
    return {
        id(p): next(
            (factor for pattern, factor in patterns.items() if fnmatchcase(name, pattern)), 1.0
        )
        for name, p in names.items()
    }


def _by_factor(
    params: Sequence[Tensor], factors: Mapping[int, float], decay: float
) -> list[dict[str, Any]]:
    """Groups of an optimizer, in order of their first parameters."""
    groups: dict[float, list[Tensor]] = {}
    for p in params:
        groups.setdefault(factors[id(p)], []).append(p)
    return [
        {"params": found, "weight_decay": decay, "factor": factor}
        for factor, found in groups.items()
    ]


def _muon(
    groups: list[dict[str, Any]], settings: OptimizerSettings, *, together: bool
) -> list[torch.optim.Optimizer]:
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise ConfigError(
            f"optimizer.kind muon needs torch 2.9 or later, found {torch.__version__}; use adamw"
        )
    for p in (p for group in groups for p in group["params"]):
        if p.ndim != 2:
            raise ConfigError(
                "optimizer.kind muon takes matrices, the model has a parameter "
                f"{list(p.shape)}; use adamw"
            )
    if not groups:
        return []
    if together:
        # Not at the top: an older torch has no Muon to derive from.
        from penstock.learn.training.muon import DividedMuon

        muon = DividedMuon
    made: torch.optim.Optimizer = muon(
        groups,
        lr=settings.peak,
        momentum=settings.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return [made]


def _fused(parameters: Iterable[Tensor], settings: OptimizerSettings) -> bool:
    possible = all(p.device.type in FUSED_DEVICES for p in parameters)
    if settings.fused and not possible:
        raise ConfigError(
            "optimizer.fused: the parameters' device has no fused AdamW; leave `fused` out"
        )
    return possible if settings.fused is None else settings.fused
