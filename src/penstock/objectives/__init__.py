"""Objectives: what turns a document into tokens with targets."""

from penstock.core.lazy_imports import public_names
from penstock.objectives.denoise import Denoise
from penstock.objectives.denoise_tasks import CausalLM, PrefixLM, SpanCorruption
from penstock.objectives.infill import Infill
from penstock.objectives.objective import Causal, Facts, Objective, Written, check_objective

__all__ = [
    "Causal",
    "CausalLM",
    "Denoise",
    "Facts",
    "Infill",
    "Objective",
    "PrefixLM",
    "SpanCorruption",
    "Written",
    "check_objective",
]

__dir__ = public_names(__name__)
