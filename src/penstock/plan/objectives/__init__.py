"""Objectives: what turns a document into tokens with targets."""

from penstock.core.lazy_imports import public_names
from penstock.plan.objectives.denoise_tasks import CausalLM, PrefixLM, SpanCorruption
from penstock.plan.objectives.objective import (
    AddingTokens,
    Bidirectional,
    Facts,
    NamingTasks,
    Nodes,
    Objective,
    Resolving,
    RewritingEos,
    WithTasks,
    WritingNodes,
    WritingTargets,
    Written,
    check_objective,
)

__all__ = [
    "AddingTokens",
    "Bidirectional",
    "CausalLM",
    "Facts",
    "NamingTasks",
    "Nodes",
    "Objective",
    "PrefixLM",
    "Resolving",
    "RewritingEos",
    "SpanCorruption",
    "WithTasks",
    "WritingNodes",
    "WritingTargets",
    "Written",
    "check_objective",
]

__dir__ = public_names(__name__)
