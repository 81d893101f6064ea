"""penstock: raw text, chats and images into the exact tensors that a language model trains on.

Names are loaded on first use, so that `import penstock` takes milliseconds and needs neither torch
nor transformers.
"""

from penstock.core.lazy_imports import lazy
from penstock.core.version import __version__ as __version__

with lazy(__name__):
    from penstock.core.errors import PenstockError
    from penstock.data.prepare.preparation import prepare
    from penstock.data.prepare.prepare_keywords import ChatOptions
    from penstock.data.prepare.trajectories import prepare_trajectories, write_trajectories
    from penstock.data.shards.dataset import Dataset
    from penstock.data.shards.memory import write_dataset
    from penstock.data.shards.opening import open_dataset
    from penstock.learn.training.losses import loss
    from penstock.models.isolation.check import check_isolation
    from penstock.plan.inputs.model_input import ModelInput
    from penstock.plan.inputs.requirements import InputRequirements
    from penstock.plan.inputs.torch_tensors import to_torch
    from penstock.plan.loader.data_parallel import DataParallel
    from penstock.plan.loader.loader import Loader
    from penstock.plan.loader.mixture import Mixture, ShareChange, Source
    from penstock.plan.objectives.denoise import Denoise
    from penstock.plan.objectives.diffusion import BlockDiffusion, MaskedDiffusion
    from penstock.plan.objectives.infill import Infill
    from penstock.plan.objectives.objective import Causal
    from penstock.tokenizers.loading import load_tokenizer
    from penstock.tokenizers.training import train_tokenizer
    from penstock.use.config.teacher_cache import cache_teacher
    from penstock.use.runs.dry_runs import plan_training
    from penstock.use.runs.inspecting import inspect
    from penstock.use.runs.opening import build_model, load_model
    from penstock.use.runs.planning import plan_run
    from penstock.use.runs.run import Run, open_run
    from penstock.use.runs.training import distill, train

with lazy(__name__, addresses=True):
    from penstock import chat, integrations, media, models, tokenizers
    from penstock.core import errors
    from penstock.data import shards, sources
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
    from penstock.plan import inputs, loader, objectives, packing, sampling
    from penstock.use import inspection, serving

__all__ = [
    "BlockDiffusion",
    "Causal",
    "ChatOptions",
    "DataParallel",
    "Dataset",
    "Denoise",
    "Infill",
    "InputRequirements",
    "Loader",
    "MaskedDiffusion",
    "Mixture",
    "ModelInput",
    "PenstockError",
    "Run",
    "ShareChange",
    "Source",
    "accelerate",
    "build_model",
    "cache_teacher",
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
    "prepare_trajectories",
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
    "write_trajectories",
]
