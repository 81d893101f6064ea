"""Working parts for other people's trainers, with state, sharding and loss: tensors of the right shape are not enough.

Each integration is a module (`ps.huggingface`, `ps.lightning`, `ps.jax`) and needs its package;
importing this room needs none. `LoaderState` is for loops of your own.
"""

from penstock.core.lazy_imports import public_names
from penstock.integrations.isolation import IsolationReport
from penstock.integrations.loader_state import LoaderState

__all__ = ["IsolationReport", "LoaderState"]

__dir__ = public_names(__name__)
