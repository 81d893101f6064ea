"""Working parts for other people's trainers: state, sharding and loss included, because shapes alone leak.

Each integration is a module of its own, `huggingface` and `jax`, and needs its extra; importing this room needs none.
"""

from importlib import import_module
from typing import Any

from penstock.integrations.isolation import IsolationReport, check_isolation

__all__ = ["IsolationReport", "check_isolation"]


def __getattr__(name: str) -> Any:
    if name in ("huggingface", "jax"):
        return import_module(f"penstock.integrations.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
