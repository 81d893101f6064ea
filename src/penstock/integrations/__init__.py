"""Working parts for other people's trainers, with state, sharding and loss: tensors of the right shape are not enough.

Each integration is a module (`ps.huggingface`, `ps.jax`) and needs its extra; importing this room needs none.
"""

from penstock.core.lazy_imports import public_names
from penstock.integrations.isolation import IsolationReport

__all__ = ["IsolationReport"]

__dir__ = public_names(__name__)
