"""Objectives: what turns a document into tokens with targets."""

from penstock.objectives.causal import Causal
from penstock.objectives.check import check_objective
from penstock.objectives.objective import Facts, Objective, Written

__all__ = ["Causal", "Facts", "Objective", "Written", "check_objective"]
