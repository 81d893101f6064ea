"""Threads and determinism of a run: what must stay for a resumed run to give the same bits."""

import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from penstock.core.json_values import JsonObject
from penstock.learn.training.settings import TrainSettings
from penstock.models.attention import flash_name
from penstock.models.products import uses_onednn

if TYPE_CHECKING:
    pass


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BitSettings:
    """The settings that must not change for a resumed run to give the same bits; saved in each
    checkpoint.
    """

    torch: str
    numpy: str
    machine: str
    """CPU architecture, or name of the GPU."""
    threads: int
    ranks: int
    context_parallel: int
    compile: bool
    deterministic: bool
    shard: bool | int
    micro_sequences: int
    rows_per_pass: int
    attention: str
    recurrent: str
    dtype: str
    fused: bool | None
    products: str
    """What multiplies large matrices: torch, which takes MKL, or oneDNN."""

    def differences(self, other: "JsonObject") -> list[str]:
        """Readable differences from the settings of a checkpoint: "threads: 2 now, 4 then"."""
        other = {"context_parallel": 1, **other}
        mine = {name: getattr(self, name) for name in self.__dataclass_fields__}
        # Checkpoints from before there was a choice.
        then = {"recurrent": "torch", "products": "torch", **other}
        return [
            f"{name}: {mine[name]} now, {then.get(name)} then"
            for name in mine
            if mine[name] != then.get(name)
        ]


def is_deterministic(settings: TrainSettings, device: torch.device) -> bool:
    """Whether a run uses only algorithms that give the same bits each time."""
    asked = settings.deterministic
    return device.type == "cpu" if asked == "auto" else asked


def prepare_torch(settings: TrainSettings, device: torch.device) -> None:
    """Set the number of threads, determinism and the products of this process; call it before the
    first operation.
    """
    deterministic = is_deterministic(settings, device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if deterministic:
        # cuBLAS is deterministic only with a fixed workspace.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # Else torch also fills each new tensor with NaN, a hundred kernels a layer; none is read before
    # it is written.
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = False
    if device.type == "cuda" and settings.precision == "auto":
        # What stays in float32 next to bfloat16, such as routers, in TF32: ten times as fast.
        torch.set_float32_matmul_precision("high")


def bit_settings(
    settings: TrainSettings,
    device: torch.device,
    ranks: int,
    rows_per_pass: int,
    dtype: str,
    fused: bool | None,
) -> BitSettings:
    """The `BitSettings` of this run; `rows_per_pass` as it was chosen."""
    return BitSettings(
        torch=torch.__version__,
        numpy=np.__version__,
        machine=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        threads=torch.get_num_threads(),
        ranks=ranks,
        context_parallel=settings.context_parallel,
        compile=settings.compile,
        deterministic=is_deterministic(settings, device),
        shard=settings.shard,
        micro_sequences=settings.micro_sequences,
        rows_per_pass=rows_per_pass,
        attention=_attention(settings, device),
        recurrent=" ".join(settings.recurrent_backends),
        dtype=dtype,
        fused=fused,
        products="oneDNN" if _by_onednn(device, dtype) else "torch",
    )


def _by_onednn(device: torch.device, dtype: str) -> bool:
    return device.type == "cpu" and dtype.startswith("torch.float32") and uses_onednn()


def _attention(settings: TrainSettings, device: torch.device) -> str:
    """The backend, with its FlashAttention where that is not the one that torch brings."""
    flash = flash_name(device.type)
    other = flash and flash != "FlashAttention 2"
    return f"{settings.attention} ({flash})" if other else settings.attention
