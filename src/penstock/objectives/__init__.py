"""Objectives: what turns a document into tokens with targets."""

from penstock.objectives.causal import Causal
from penstock.objectives.check import check_objective
from penstock.objectives.denoise import Denoise
from penstock.objectives.infill import Infill
from penstock.objectives.objective import Facts, Objective, Written
from penstock.objectives.tasks import CausalLM, PrefixLM, SpanCorruption

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
