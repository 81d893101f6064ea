"""Objectives: what turns a document into tokens with targets."""

from penstock.core.lazy_imports import public_names
from penstock.plan.objectives.denoise_tasks import CausalLM, PrefixLM, SpanCorruption
from penstock.plan.objectives.objective import Facts, Objective, Written, check_objective

__all__ = [
    "CausalLM",
    "Facts",
    "Objective",
    "PrefixLM",
    "SpanCorruption",
    "Written",
    "check_objective",
]

__dir__ = public_names(__name__)
