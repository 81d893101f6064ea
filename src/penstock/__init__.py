"""penstock: raw text, chats and images into the exact tensors that a language model trains on.

Names are loaded on first use, so that `import penstock` takes milliseconds and needs neither torch
nor transformers.
"""

from typing import TYPE_CHECKING

from penstock.core.lazy_imports import lazy, short_addresses
from penstock.core.version import __version__ as __version__

if TYPE_CHECKING:
    from penstock import chat, integrations, media, models, tokenizers
    from penstock.core import errors
    from penstock.core.errors import PenstockError
    from penstock.data import shards, sources
    from penstock.data.prepare.preparation import prepare
    from penstock.data.prepare.prepare_keywords import ChatOptions
    from penstock.data.shards.dataset import Dataset
    from penstock.data.shards.memory import write_dataset
    from penstock.data.shards.opening import open_dataset
    from penstock.integrations import (
        accelerate,
        huggingface,
        jax,
        lightning,
        megatron,
        torchtitan,
        trl,
    )
    from penstock.learn import distillation, evaluation, generation, training
    from penstock.learn.training.losses import loss
    from penstock.models.isolation.check import check_isolation
    from penstock.plan import inputs, loader, objectives, packing, sampling
    from penstock.plan.inputs.model_input import ModelInput
    from penstock.plan.inputs.requirements import InputRequirements
    from penstock.plan.inputs.torch_tensors import to_torch
    from penstock.plan.loader.data_parallel import DataParallel
    from penstock.plan.loader.loader import Loader
    from penstock.plan.loader.mixture import Mixture, ShareChange, Source
    from penstock.plan.objectives.denoise import Denoise
    from penstock.plan.objectives.infill import Infill
    from penstock.plan.objectives.objective import Causal
    from penstock.tokenizers.loading import load_tokenizer
    from penstock.tokenizers.training import train_tokenizer
    from penstock.use import inspection, serving
    from penstock.use.runs.inspecting import inspect
    from penstock.use.runs.opening import build_model, load_model
    from penstock.use.runs.planning import plan_run, plan_training
    from penstock.use.runs.run import Run, open_run
    from penstock.use.runs.training import distill, train

_NAMES = {
    "PenstockError": "core.errors",
    "load_tokenizer": "tokenizers.loading",
    "train_tokenizer": "tokenizers.training",
    "ChatOptions": "data.prepare.prepare_keywords",
    "prepare": "data.prepare.preparation",
    "Dataset": "data.shards.dataset",
    "open_dataset": "data.shards.opening",
    "write_dataset": "data.shards.memory",
    "Causal": "plan.objectives.objective",
    "Denoise": "plan.objectives.denoise",
    "Infill": "plan.objectives.infill",
    "InputRequirements": "plan.inputs.requirements",
    "ModelInput": "plan.inputs.model_input",
    "DataParallel": "plan.loader.data_parallel",
    "Loader": "plan.loader.loader",
    "Mixture": "plan.loader.mixture",
    "ShareChange": "plan.loader.mixture",
    "Source": "plan.loader.mixture",
    "check_isolation": "models.isolation.check",
    "to_torch": "plan.inputs.torch_tensors",
    "Run": "use.runs.run",
    "build_model": "use.runs.opening",
    "distill": "use.runs.training",
    "inspect": "use.runs.inspecting",
    "load_model": "use.runs.opening",
    "open_run": "use.runs.run",
    "plan_run": "use.runs.planning",
    "plan_training": "use.runs.planning",
    "train": "use.runs.training",
    "loss": "learn.training.losses",
}
"""Public name → the module that defines it."""

_MODULES = {
    "accelerate": "integrations.accelerate",
    "chat": "chat",
    "distillation": "learn.distillation",
    "errors": "core.errors",
    "evaluation": "learn.evaluation",
    "generation": "learn.generation",
    "huggingface": "integrations.huggingface",
    "inputs": "plan.inputs",
    "inspection": "use.inspection",
    "integrations": "integrations",
    "jax": "integrations.jax",
    "lightning": "integrations.lightning",
    "loader": "plan.loader",
    "media": "media",
    "megatron": "integrations.megatron",
    "models": "models",
    "objectives": "plan.objectives",
    "packing": "plan.packing",
    "sampling": "plan.sampling",
    "serving": "use.serving",
    "shards": "data.shards",
    "sources": "data.sources",
    "tokenizers": "tokenizers",
    "torchtitan": "integrations.torchtitan",
    "training": "learn.training",
    "trl": "integrations.trl",
}
"""Public name → the module that it is; `from penstock.objectives import Written` finds it by that
name, too.
"""

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _NAMES, _MODULES)
    short_addresses(__name__, _MODULES)

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
    "distill",
    "distillation",
    "errors",
    "evaluation",
    "generation",
    "huggingface",
    "inputs",
    "inspect",
    "inspection",
    "integrations",
    "jax",
    "lightning",
    "load_model",
    "load_tokenizer",
    "loader",
    "loss",
    "media",
    "megatron",
    "models",
    "objectives",
    "open_dataset",
    "open_run",
    "packing",
    "plan_run",
    "plan_training",
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
