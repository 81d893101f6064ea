"""The dtype in which an export stores weights: narrower than that of training, to halve a folder.

Guarantees: each weight is rounded once, to nearest; tensors that share memory still do; a model of
transformers keeps in float32 what its own code keeps there (routers' biases, for example), so the
weights are those that `from_pretrained(…, dtype=…)` makes of an export without a dtype. The model
is not changed. Costs the memory of the written weights.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject

StoredDtype = Literal["float32", "bfloat16", "float16"]
_KEYS = ("dtype", "torch_dtype")
"""In a `config.json`: what transformers writes since version 5, and what it wrote before."""


def stored_dtype(name: str | None) -> torch.dtype | None:
    """The dtype by its name; None: weights keep theirs.

    Raises:
        ConfigError: It is not one in which weights are exported.
    """
    if name is None:
        return None
    if name not in (known := get_args(StoredDtype)):
        raise ConfigError(f"export: dtype must be one of {', '.join(known)}, got {name!r}")
    found: torch.dtype = getattr(torch, name)
    return found


def cast_weights(
    weights: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    keeps: Callable[[str], bool] = lambda name: False,
) -> dict[str, Tensor]:
    """Weights in a dtype, by the same names.

    Args:
        weights: By their names.
        dtype: None: they keep theirs, as integers always do.
        keeps: Whether the weight of a name keeps its dtype.

    Raises:
        ConfigError: One is too large for the dtype.
    """
    made: dict[tuple[Any, ...], Tensor] = {}
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        place = (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, keeps(name))
        if place not in made:
            cast = dtype is not None and weight.is_floating_point() and not keeps(name)
            made[place] = _cast(name, weight, dtype) if cast else weight
        found[name] = made[place]
    return found


def _cast(name: str, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    cast = weight.detach().to(dtype)
    if not cast.isfinite().all():
        assert dtype is not None
        largest, limit = weight.detach().abs().max().item(), torch.finfo(dtype).max
        raise ConfigError(
            f"export: {name} has a weight of {largest:,.6g}, and the largest number of "
            f"{str(dtype).removeprefix('torch.')} is {limit:,.6g}; export in bfloat16"
        )
    return cast


def kept_in_float32(inner: nn.Module, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Whether transformers keeps a weight of its model in float32 in spite of a narrower dtype, by
    the weight's name.
    """
    patterns: set[str] = set()
    if dtype in (torch.bfloat16, torch.float16):
        patterns |= set(getattr(inner, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        patterns |= set(getattr(inner, "_keep_in_fp32_modules", None) or ())
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in sorted(patterns)]
    return lambda name: any(pattern.search(name) for pattern in kept)


def with_dtype(config: JsonObject, dtype: torch.dtype) -> JsonObject:
    """A `config.json` that names the dtype, and so do the settings of its parts that name one."""
    named = str(dtype).removeprefix("torch.")
    changed: JsonObject = {
        name: with_dtype(value, dtype) if isinstance(value, dict) and _names(value) else value
        for name, value in config.items()
    }
    return {**changed, **dict.fromkeys([key for key in _KEYS if key in config] or ["dtype"], named)}


def _names(settings: JsonObject) -> bool:
    return any(key in settings for key in _KEYS)
