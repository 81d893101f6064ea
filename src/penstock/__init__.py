"""penstock: raw text, chats and images into the exact tensors that a language model trains on.

Names are loaded on first use, so that `import penstock` takes milliseconds and needs neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.errors import PenstockError as PenstockError
    from penstock.integrations.isolation import check_isolation as check_isolation

__version__ = "0.1.0"

_HOMES = {
    "PenstockError": "errors",
    "load_tokenizer": "tokenizers",
    "train_tokenizer": "tokenizers",
    "prepare": "prepare",
    "Dataset": "shards",
    "open_dataset": "shards",
    "write_dataset": "shards",
    "Causal": "objectives",
    "InputRequirements": "inputs",
    "ModelInput": "inputs",
    "DataParallel": "loader",
    "Loader": "loader",
    "Mixture": "loader",
    "ShareChange": "loader",
    "Source": "loader",
    "check_isolation": "integrations",
}
"""Public name → the room it lives in."""

_ROOMS = {
    "errors": "errors",
    "huggingface": "integrations.huggingface",
    "objectives": "objectives",
    "packing": "packing",
    "sampling": "sampling",
    "shards": "shards",
    "sources": "sources",
    "tokenizers": "tokenizers",
}
"""Rooms reachable as attributes → their module."""

__all__ = sorted([*_HOMES, *_ROOMS])


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"penstock.{_HOMES[name]}"), name)
    if name in _ROOMS:
        return import_module(f"penstock.{_ROOMS[name]}")
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
