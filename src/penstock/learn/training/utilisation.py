"""Model FLOPs utilisation (MFU): the operations that a model's mathematics needs, over those that
the device could do in the same time: by the maker's data sheet for known GPUs, else by a product
that is timed at the start.

Counted are the matrix products of each token (2 operations for each weight forward, 4 backward, or
2 where the weight is frozen) and the pairs of query and key of each document, as far as windows
reach. What activation checkpoints compute again does not count, nor do norms, rotations and
softmax. So the number compares runs, also with other trainers that count so.

Source: PaLM, arXiv:2204.02311, appendix B; attention by document, causal.
"""

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from time import perf_counter
from typing import Any, final

import numpy as np
import torch
from torch import nn

from penstock.core.arrays import Int64
from penstock.core.system import peak_memory_bytes
from penstock.models import LanguageModel
from penstock.models.four_bits import four_bit_layers
from penstock.models.isolation.lengths import text_config
from penstock.models.ours.experts import Experts
from penstock.models.ours.transformer import Transformer
from penstock.models.products import linear
from penstock.plan.inputs.model_input import ModelInput

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
}
"""Products of bfloat16 a second, without sparsity, as the makers' data sheets say; by words of the
devices' names, the longer ones first.
"""
_SAME_PEAK = re.compile(
    r"NVIDIA|GeForce|Tesla|AMD|Instinct|OAM|SXM\d?|PCIe|HBM\de?|\d+GB", re.IGNORECASE
)
"""Words of a name that leave the peak as it is. Others (NVL, Laptop, Ti, a MIG's size) may not."""
_ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def peak_of(device: torch.device) -> float | None:
    """Operations a second that a GPU could do in bfloat16; None: unknown, as where its name has
    words that may make it another one.
    """
    if device.type != "cuda":
        return None
    words = re.split(r"[\s-]+", torch.cuda.get_device_name(device))
    for known, peak in PEAKS.items():
        named = known.split()
        if set(named) <= set(words):
            rest = [word for word in words if word not in named]
            return peak if all(map(_SAME_PEAK.fullmatch, rest)) else None
    return None


@cache
def measured_peak(device: torch.device, threads: int) -> float:
    """Operations a second of the fastest of a few square products in float32: what `mfu` compares
    with where no data sheet is known. Some ten milliseconds, once a process.

    Args:
        device: A CPU, or a GPU that `PEAKS` does not know.
        threads: Torch's, on which a CPU's speed depends.
    """
    assert threads > 0
    side = 512 if device.type == "cpu" else 4096
    factor = torch.ones(side, side, device=device)
    best = 0.0
    for _ in range(5):
        begin = perf_counter()
        # By the library that training takes; reading a value waits for the device.
        with torch.inference_mode():
            float(linear(factor, factor)[0, 0])
        best = max(best, 2 * side**3 / (perf_counter() - begin))
    return best


def _peak_memory(device: torch.device) -> int:
    """Bytes that torch held at most on a GPU, or this process in all on a CPU; 0: unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_memory_bytes() if device.type == "cpu" else 0


@final
class Operations:
    """Counts the operations of a model's rows.

    Args:
        model: As it is trained.
    """

    def __init__(self, model: LanguageModel) -> None:
        assert isinstance(model, nn.Module)
        self.each_token = sum(
            share * weight.numel() * (6 if weight.requires_grad else 4)
            for weight, share in _matrices(model)
        ) + sum(4 * share * size for size, share in _four_bit_matrices(model))
        self._layers = Counter(_attention(model))

    def of(self, rows: Iterable[ModelInput]) -> float:
        """Operations of some rows, forward and backward; padding counts for nothing.

        Args:
            rows: As a step has them, not joined: there padding is a document like others.
        """
        total = 0.0
        for row in rows:
            assert row.cu_seqlens is not None
            assert np.all(row.source_ids >= 0)
            ends = np.minimum(row.cu_seqlens, row.num_tokens).astype(np.int64)
            lengths = np.diff(ends)
            total += self.each_token * int(lengths.sum())
            for (width, window), layers in self._layers.items():
                # Two products of width operations times 2 for each pair, and twice as many back.
                total += 12.0 * layers * width * pairs(lengths, window)
        return total


@final
class Utilisation:
    """How well a rank's device is used, for the record of each step.

    Args:
        model: As it is trained.
        device: That of this rank.
        share: Ranks that share each row.
    """

    def __init__(self, model: LanguageModel, device: torch.device, *, share: int = 1) -> None:
        self._device, self._share = device, share
        known = peak_of(device)
        self._measured = known is None
        self._peak = known or measured_peak(device, torch.get_num_threads())
        self._operations = Operations(model)

    def figures(self, rows: Iterable[ModelInput], seconds: float) -> dict[str, float]:
        """`mfu`, a share of the peak in the data sheet or else of the measured one, and
        `peak_memory` in bytes where it is known; see `Operations.of` for the rows.
        """
        rate = self._operations.of(rows) / self._share / seconds
        if self._measured:
            # The device had other work when it was measured, if a step is faster.
            self._peak = max(self._peak, rate)
        found: dict[str, float] = {"mfu": round(rate / self._peak, 4)}
        if memory := _peak_memory(self._device):
            found["peak_memory"] = memory
        return found


def pairs(lengths: Int64, window: int | None) -> int:
    """Pairs of query and key of causal documents, of which a query sees at most `window`."""
    short = lengths if window is None else np.minimum(lengths, window)
    found: Int64 = short * (short + 1) // 2 + (lengths - short) * short
    return int(found.sum())


def _matrices(model: nn.Module) -> list[tuple[nn.Parameter, float]]:
    """Weights that are multiplied with tokens, and with which share of the tokens each is."""
    shares: dict[nn.Parameter, float] = {}
    for experts_of, share in _experts(model):
        shares |= dict.fromkeys(experts_of.parameters(), share)
    config: Any = text_config(getattr(model, "inner", model))
    routed, experts = (
        next((n for name in names if isinstance(n := getattr(config, name, None), int)), None)
        for names in (_ROUTED, _EXPERTS)
    )
    found: dict[nn.Parameter, float] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            fused = weight.ndim == 3 and weight.shape[0] == experts
            if fused and routed and experts:
                found[weight] = routed / experts
            elif weight.ndim == 2 and name == "weight" and hasattr(module, "in_features"):
                found[weight] = shares.get(weight, 1.0)
    if isinstance(model, Transformer) and model.unembedding is None:
        found[model.embedding.weight] = 1.0  # type: ignore[index]
    return list(found.items())


def _four_bit_matrices(model: nn.Module) -> list[tuple[int, float]]:
    """Weights of each matrix in 4 bits, all of which are frozen, and its share of the tokens."""
    shares: dict[nn.Module, float] = {}
    for experts_of, share in _experts(model):
        shares |= dict.fromkeys(experts_of.modules(), share)
    return [
        (layer.in_features * layer.out_features, shares.get(layer, 1.0))
        for _, layer in four_bit_layers(model)
    ]


def _experts(model: nn.Module) -> list[tuple[nn.Module, float]]:
    """The experts of each block of ours, and which share of the tokens each of them gets."""
    return [
        (module.experts, module.each / len(module.experts))
        for module in model.modules()
        if isinstance(module, Experts)
    ]


def _attention(model: nn.Module) -> list[tuple[int, int | None]]:
    """(heads × their width, window) of each layer that attends, where it is known."""
    if isinstance(model, Transformer):
        width = model.settings.heads * model.settings.each_head
        mains = [
            model.settings.mixers(model.settings.block(layer))[0]
            for layer in range(model.settings.num_blocks)
        ]
        return [(width, main.sliding_window) for main in mains if not main.is_recurrent]
    shape = getattr(getattr(model, "fit", None), "shape", None)
    if shape is None:
        return []
    config: Any = text_config(getattr(model, "inner", model))
    return [(config.num_attention_heads * shape.head_width, window) for window in shape.windows]
