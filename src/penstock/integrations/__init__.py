"""Working parts for other people's trainers, with state, sharding and loss: tensors of the right shape are not enough.

Each integration is a module (`huggingface`, `jax`) and needs its extra; importing this room needs none.
"""

from typing import TYPE_CHECKING

from penstock.core.lazy_imports import lazy
from penstock.integrations.isolation import IsolationReport, check_isolation

if TYPE_CHECKING:
    from penstock.integrations import huggingface, jax
else:
    __getattr__, __dir__ = lazy(__name__, {}, modules={"huggingface": "huggingface", "jax": "jax"})

__all__ = ["IsolationReport", "check_isolation", "huggingface", "jax"]
