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
        media,
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
    from penstock.inputs.model_input import InputRequirements, ModelInput
    from penstock.inputs.torch_tensors import to_torch
    from penstock.integrations import accelerate, huggingface, jax, lightning, megatron, torchtitan, trl
    from penstock.integrations.isolation import check_isolation
    from penstock.loader.data_parallel import DataParallel
    from penstock.loader.loader import Loader
    from penstock.loader.mixture import Mixture, ShareChange, Source
    from penstock.objectives.denoise import Denoise
    from penstock.objectives.infill import Infill
    from penstock.objectives.objective import Causal
    from penstock.prepare.preparation import prepare
    from penstock.prepare.settings import ChatOptions
    from penstock.runs.inspecting import inspect
    from penstock.runs.opening import build_model, load_model
    from penstock.runs.run import Run, open_run
    from penstock.runs.training import distil, train
    from penstock.shards.dataset import Dataset
    from penstock.shards.joined import open_dataset
    from penstock.shards.memory import write_dataset
    from penstock.tokenizers.loading import load_tokenizer
    from penstock.tokenizers.training import train_tokenizer
    from penstock.training.losses import loss

_NAMES = {
    "PenstockError": "core.errors",
    "load_tokenizer": "tokenizers.loading",
    "train_tokenizer": "tokenizers.training",
    "ChatOptions": "prepare.settings",
    "prepare": "prepare.preparation",
    "Dataset": "shards.dataset",
    "open_dataset": "shards.joined",
    "write_dataset": "shards.memory",
    "Causal": "objectives.objective",
    "Denoise": "objectives.denoise",
    "Infill": "objectives.infill",
    "InputRequirements": "inputs.model_input",
    "ModelInput": "inputs.model_input",
    "DataParallel": "loader.data_parallel",
    "Loader": "loader.loader",
    "Mixture": "loader.mixture",
    "ShareChange": "loader.mixture",
    "Source": "loader.mixture",
    "check_isolation": "integrations.isolation",
    "to_torch": "inputs.torch_tensors",
    "Run": "runs.run",
    "build_model": "runs.opening",
    "distil": "runs.training",
    "inspect": "runs.inspecting",
    "load_model": "runs.opening",
    "open_run": "runs.run",
    "train": "runs.training",
    "loss": "training.losses",
}
"""Public name → the module that defines it."""

_MODULES = {
    "accelerate": "integrations.accelerate",
    "chat": "chat",
    "distillation": "distillation",
    "errors": "core.errors",
    "evaluation": "evaluation",
    "generation": "generation",
    "huggingface": "integrations.huggingface",
    "integrations": "integrations",
    "jax": "integrations.jax",
    "lightning": "integrations.lightning",
    "media": "media",
    "megatron": "integrations.megatron",
    "models": "models",
    "objectives": "objectives",
    "packing": "packing",
    "sampling": "sampling",
    "serving": "serving",
    "shards": "shards",
    "sources": "sources",
    "tokenizers": "tokenizers",
    "torchtitan": "integrations.torchtitan",
    "training": "training",
    "trl": "integrations.trl",
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
    "accelerate",
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
    "lightning",
    "load_model",
    "load_tokenizer",
    "loss",
    "media",
    "megatron",
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
    "torchtitan",
    "train",
    "train_tokenizer",
    "training",
    "trl",
    "write_dataset",
]


class _Package(ModuleType):
    """Python puts an imported submodule into its package as an attribute; `ps.prepare` must stay the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _NAMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
