"""The loader: a mixture of datasets becomes steps of model inputs."""

from penstock.core.lazy_imports import public_names
from penstock.loader.companion import Accompany, Companion, CompanionSource
from penstock.loader.explain import PieceOrigin
from penstock.loader.plan import Plan, PlanState, Window
from penstock.loader.plan_settings import PlanSettings
from penstock.loader.steps import Step

__all__ = [
    "Accompany",
    "Companion",
    "CompanionSource",
    "PieceOrigin",
    "Plan",
    "PlanSettings",
    "PlanState",
    "Step",
    "Window",
]

__dir__ = public_names(__name__)
