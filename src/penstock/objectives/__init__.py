"""Objectives: what turns a document into tokens with targets."""

from penstock.objectives.causal import Causal
from penstock.objectives.objective import Objective

__all__ = ["Causal", "Objective"]
