"""penstock: raw text, chats and images into the exact tensors that a language model trains on.

Names are loaded on first use, so that `import penstock` takes milliseconds and needs neither torch nor transformers.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from penstock.core.lazy_imports import lazy

if TYPE_CHECKING:
    from penstock import (
        chat,
        distillation,
        evaluation,
        generation,
        integrations,
        models,
        objectives,
        packing,
        sampling,
        serving,
        shards,
        sources,
        tokenizers,
        training,
    )
    from penstock.core import errors
    from penstock.core.errors import PenstockError
    from penstock.inputs import InputRequirements, ModelInput
    from penstock.integrations import huggingface, jax
    from penstock.integrations.isolation import check_isolation
    from penstock.integrations.torch_tensors import to_torch
    from penstock.loader import DataParallel, Loader, Mixture, ShareChange, Source
    from penstock.objectives import Causal, Denoise, Infill
    from penstock.prepare import ChatOptions, prepare
    from penstock.runs import Run, build_model, distil, inspect, load_model, open_run, train
    from penstock.shards import Dataset, open_dataset, write_dataset
    from penstock.tokenizers import load_tokenizer, train_tokenizer
    from penstock.training import loss

_NAMES = {
    "PenstockError": "core.errors",
    "load_tokenizer": "tokenizers",
    "train_tokenizer": "tokenizers",
    "ChatOptions": "prepare",
    "prepare": "prepare",
    "Dataset": "shards",
    "open_dataset": "shards",
    "write_dataset": "shards",
    "Causal": "objectives",
    "Denoise": "objectives",
    "Infill": "objectives",
    "InputRequirements": "inputs",
    "ModelInput": "inputs",
    "DataParallel": "loader",
    "Loader": "loader",
    "Mixture": "loader",
    "ShareChange": "loader",
    "Source": "loader",
    "check_isolation": "integrations",
    "to_torch": "integrations.torch_tensors",
    "Run": "runs",
    "build_model": "runs",
    "distil": "runs",
    "inspect": "runs",
    "load_model": "runs",
    "open_run": "runs",
    "train": "runs",
    "loss": "training",
}
"""Public name → the module that defines it."""

_MODULES = {
    "chat": "chat",
    "distillation": "distillation",
    "errors": "core.errors",
    "evaluation": "evaluation",
    "generation": "generation",
    "huggingface": "integrations.huggingface",
    "integrations": "integrations",
    "jax": "integrations.jax",
    "models": "models",
    "objectives": "objectives",
    "packing": "packing",
    "sampling": "sampling",
    "serving": "serving",
    "shards": "shards",
    "sources": "sources",
    "tokenizers": "tokenizers",
    "training": "training",
}
"""Public name → the module that it is."""

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _NAMES, _MODULES)

__version__ = "0.1.0"

__all__ = [
    "Causal",
    "ChatOptions",
    "DataParallel",
    "Dataset",
    "Denoise",
    "Infill",
    "InputRequirements",
    "Loader",
    "Mixture",
    "ModelInput",
    "PenstockError",
    "Run",
    "ShareChange",
    "Source",
    "build_model",
    "chat",
    "check_isolation",
    "distil",
    "distillation",
    "errors",
    "evaluation",
    "generation",
    "huggingface",
    "inspect",
    "integrations",
    "jax",
    "load_model",
    "load_tokenizer",
    "loss",
    "models",
    "objectives",
    "open_dataset",
    "open_run",
    "packing",
    "prepare",
    "sampling",
    "serving",
    "shards",
    "sources",
    "to_torch",
    "tokenizers",
    "train",
    "train_tokenizer",
    "training",
    "write_dataset",
]


class _Package(ModuleType):
    """Python puts an imported submodule into its package as an attribute; `ps.prepare` must stay the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _NAMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
