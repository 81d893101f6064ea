"""The loader: a mixture of datasets becomes steps of model inputs."""

from penstock.core.lazy_imports import public_names
from penstock.plan.loader.companion import Accompany, Companion, CompanionSource
from penstock.plan.loader.explain import PieceOrigin
from penstock.plan.loader.loader_settings import LoaderSettings
from penstock.plan.loader.plan import Plan, PlanState, Window
from penstock.plan.loader.plan_settings import PlanSettings
from penstock.plan.loader.step_documents import StepDocuments
from penstock.plan.loader.steps import Step

__all__ = [
    "Accompany",
    "Companion",
    "CompanionSource",
    "LoaderSettings",
    "PieceOrigin",
    "Plan",
    "PlanSettings",
    "PlanState",
    "Step",
    "StepDocuments",
    "Window",
]

__dir__ = public_names(__name__)
