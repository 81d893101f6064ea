"""Working parts for other people's trainers, with state, sharding and loss: tensors of the right
shape are not enough.

Each integration is a module (`ps.huggingface`, `ps.lightning`, `ps.jax`) and needs its package;
importing this room needs none. `LoaderState` is for loops of your own; so is `check_ranks`, which
all ranks call once, and which every integration calls by itself.
"""

from penstock.core.lazy_imports import public_names
from penstock.integrations.loader_state import LoaderState
from penstock.models.isolation.report import IsolationReport
from penstock.plan.loader.agreement import check_ranks

__all__ = ["IsolationReport", "LoaderState", "check_ranks"]

__dir__ = public_names(__name__)
