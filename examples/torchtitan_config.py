"""A configuration of torchtitan whose data come from prepared datasets; torchtitan's own command
trains it.

    penstock prepare web/*.jsonl --tokenizer tokenizer.json --output data/web
    PYTHONPATH=examples torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_config \
        --config llama3_packed --dataloader.dataset_path data/web --hf_assets_path
        data/web/tokenizer

Needs `pip install 'penstock[train]' torchtitan`, and GPUs: torchtitan has no attention with
documents for CPUs. In a configuration of your own, a mixture is a line: `mixture={"data/web": 0.7,
"data/code": 0.3}`.
"""

from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

import penstock as ps

GLOBAL_BATCH_SIZE = 64


def llama3_packed() -> Trainer.Config:
    """torchtitan's small Llama on packed rows of 2,048 tokens, 64 a step."""
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    config.training.local_batch_size, config.training.global_batch_size = 8, GLOBAL_BATCH_SIZE
    config.training.seq_len, config.training.steps = 2048, 1000
    config.dataloader = ps.torchtitan.DataLoader.Config(rows_per_step=GLOBAL_BATCH_SIZE, seed=7)
    config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.last_save_model_only = (
        True,
        100,
        False,
    )
    config.validator.enable = False
    return config
