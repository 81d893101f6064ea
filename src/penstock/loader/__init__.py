"""The loader: a mixture of datasets becomes steps of model inputs."""

from penstock.core.lazy_imports import public_names
from penstock.loader._plan_kernels import CURSOR, PIECE
from penstock.loader.companion import Accompany, Companion, CompanionSource
from penstock.loader.data_parallel import DataParallel
from penstock.loader.explain import PieceOrigin
from penstock.loader.loader import Loader
from penstock.loader.mixture import Mixture, ShareChange, Source
from penstock.loader.plan import Plan, PlanSettings, PlanState, Window
from penstock.loader.steps import Step

__all__ = [
    "CURSOR",
    "PIECE",
    "Accompany",
    "Companion",
    "CompanionSource",
    "DataParallel",
    "Loader",
    "Mixture",
    "PieceOrigin",
    "Plan",
    "PlanSettings",
    "PlanState",
    "ShareChange",
    "Source",
    "Step",
    "Window",
]

__dir__ = public_names(__name__)
