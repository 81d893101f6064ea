"""Products of hidden states and weights while texts are written: by the faster of two libraries.

torch multiplies float32 matrices on x86 with Intel's MKL, which takes its slower kernels on
processors of other makers. oneDNN, which torch carries for convolutions and half precision, does
not: on an AMD EPYC of Zen 5 it takes half the time for 64 rows and more, and 0.7 of it for one to
eight, where reading the weights is most of the work.

Only generation asks for it, in inference mode: everything else has torch's own bits. Both sum in
float32, in another order. The choice depends on processor and shape alone, never on a clock, so a
text is the same in every run.
"""

import logging
import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

LEAST_WEIGHTS, LEAST_PRODUCTS = 1 << 18, 1 << 20
"""Numbers of a matrix, or products of numbers, from which oneDNN is used: a call of it takes 10 µs
more.
"""
TOLERANCE = 1e-5
"""Relative difference between the two that a trial allows; their rounding is 1e-6."""
_log = logging.getLogger("penstock.models")


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`linear`: x [..., inputs] and weight [outputs, inputs], of one dtype → [..., outputs]."""
    if torch.is_inference_mode_enabled() and _is_for_onednn(x, weight):
        return _onednn(x, weight)
    return linear(x, weight)


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and (weight.numel() >= LEAST_WEIGHTS or x.numel() * weight.shape[0] >= LEAST_PRODUCTS)
        # Not a shard, nor anything else that only torch's own operations know.
        and type(weight) in (Tensor, nn.Parameter)
        and weight.is_contiguous()
        and onednn_is_faster()
    )


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    # The operation that torch.compile puts in place of a linear layer; nothing is fused to it.
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return found


@cache
def onednn_is_faster() -> bool:
    """Whether torch multiplies with MKL on a processor of AMD, and its oneDNN works."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if maker() != "AMD":
        return False
    try:
        difference = disagreement()
    except Exception as error:  # The operation is not public: another torch may lack or change it.
        _log.info("products run with MKL, which is slower here: oneDNN fails (%s)", error)
        return False
    if difference > TOLERANCE:
        _log.warning(
            "products run with MKL, which is slower here: oneDNN's differ from torch's by %.1g of "
            "the largest; see torch.backends.mkldnn.matmul.fp32_precision",
            difference,
        )
    return difference <= TOLERANCE


def disagreement() -> float:
    """How much a product of oneDNN differs from that of torch, relative to its largest number."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 300, generator=generator)
    worst = 0.0
    for rows in (1, 3, 40):
        x = torch.randn(rows, 300, generator=generator)
        expected = linear(x.double(), weight.double())
        worst = max(
            worst, float((_onednn(x, weight) - expected).abs().max() / expected.abs().max())
        )
    return worst


def maker() -> str:
    """Who made the processor: "AMD", "Intel", or "" if it is another, or not known."""
    named = platform.processor()
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        with facts.open(encoding="utf-8", errors="replace") as lines:
            named += next((line for line in lines if line.startswith("vendor_id")), "")
    known = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
    return next((name for word, name in known.items() if word in named), "")
