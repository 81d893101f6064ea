"""torchtitan's own Trainer on the CPU with penstock's dataloader, as one of several ranks: what it
saw and computed.

`python torchtitan_run.py SETTINGS.json OUTPUT.json` with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT set.

torchtitan looks for a GPU. Here it finds a CPU, and its FlexAttention, which is compiled and has no
backward on CPUs, runs as torch's own reference with dense matrices. Masks, model, loss, FSDP and
checkpoints are torchtitan's.
"""

# ruff: noqa: E402

import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.simplefilter("ignore")

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"

from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import flex_attention as flex
from torchtitan.components import metrics
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed import utils as distributed
from torchtitan.models.common import attention
from torchtitan.models.llama3 import config_registry, model_registry
from torchtitan.trainer import Trainer

import penstock as ps

flex._validate_device = lambda *_: None
attention.FlexAttention._compiled_flex_attn = staticmethod(flex.flex_attention)
metrics.build_device_memory_monitor = lambda: SimpleNamespace(
    device_name="cpu",
    reset_peak_stats=lambda: None,
    get_peak_stats=lambda: metrics.DeviceMemStats(0, 0, 0, 0, 0, 0),
)
# It names GPUs.
distributed.set_pg_timeouts = lambda *_, **__: None


class NoTokenizer(BaseTokenizer):
    """The data are ids already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any = None, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


class Recording(Trainer):
    """Keeps what each forward and backward pass was given, and its loss."""

    seen: list[Any]

    def forward_backward_step(
        self, *, input_dict: Any, labels: Any, global_valid_tokens: Any
    ) -> Any:
        found = {
            "input": input_dict["input"],
            "positions": input_dict["positions"],
            "labels": labels,
        }
        found = {name: value.tolist() for name, value in found.items()}
        loss = super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )
        self.seen.append(
            {**found, "loss": float(loss.detach()), "denominator": int(global_valid_tokens)}
        )
        return loss


def make_config(data: str, output: str, *, steps: int, rows: int, size: int, interval: int) -> Any:
    config = config_registry.llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    config.loss = CrossEntropyLoss.Config(global_vocab_size=2048)
    config.dump_folder, config.tokenizer = output, NoTokenizer.Config()
    training = config.training
    training.local_batch_size, training.global_batch_size, training.seq_len = size, rows, 64
    training.steps, training.disable_cuda_graphs, training.mixed_precision_param = (
        steps,
        True,
        "float32",
    )
    config.dataloader = ps.torchtitan.DataLoader.Config(
        dataset_path=data, rows_per_step=rows, seed=3
    )
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable, config.checkpoint.interval = True, interval
    config.checkpoint.last_save_model_only = False
    # With a mode of selective recomputation, Flex would be looked for among compiled operations.
    config.activation_checkpoint = None
    config.validator.enable = False
    config.debug.seed = 1
    return config


def loss_of(
    model: Any, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor
) -> float:
    """Sum of cross-entropies of one row."""
    with torch.no_grad():
        logits = model(
            tokens,
            positions=positions,
            attention_masks=model.get_attention_masks(positions=positions),
        )
    return float(
        torch.nn.functional.cross_entropy(
            logits[0].float(), labels[0], reduction="sum", ignore_index=-100
        )
    )


def first_step_alone(trainer: Any, data: str, rows: int) -> dict[str, float]:
    """Loss of the first step, each document by itself; and, as a control, with documents that see
    each other.
    """
    model = trainer.model_parts[0]
    step = next(iter(ps.Loader(data, sequence_length=64, rows_per_step=rows, seed=3)))
    alone = leaking = 0.0
    for row in step:
        tokens, labels = (
            torch.tensor(one.astype("int64"))[None] for one in (row.tokens, row.targets[0])
        )
        leaking += loss_of(model, tokens, labels, torch.arange(64)[None])
        for begin, end in zip(row.cu_seqlens.tolist(), row.cu_seqlens[1:].tolist(), strict=False):
            if begin < row.num_tokens:
                part = slice(begin, end)
                alone += loss_of(
                    model, tokens[:, part], labels[:, part], torch.arange(end - begin)[None]
                )
    return {"alone": alone / step.loss_denominator, "leaking": leaking / step.loss_denominator}


def train_once(**settings: Any) -> dict[str, Any]:
    trainer = Recording(make_config(**settings))
    trainer.seen = []
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    single = torch.distributed.get_world_size() == 1
    alone = first_step_alone(trainer, settings["data"], settings["rows"]) if single else {}
    trainer.train()
    trainer.close()
    return {"seen": trainer.seen, "step": trainer.step, **alone}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = train_once(**json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
