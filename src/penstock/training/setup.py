"""What is decided before the first step: threads, determinism, and the settings that change bits."""

import os
import platform
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from penstock.training.settings import TrainSettings


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BitSettings:
    """What must be the same for a resumed run to give the same bits; kept in each checkpoint."""

    torch: str
    numpy: str
    machine: str
    """Processor architecture, or the GPU's name."""
    threads: int
    ranks: int
    compile: bool
    deterministic: bool
    shard: bool
    micro_sequences: int
    attention: str
    dtype: str
    fused: bool | None

    def differences(self, other: "dict[str, Any]") -> list[str]:
        """What differs from the settings of a checkpoint, for people: "threads: 2 now, 4 then"."""
        mine = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return [f"{name}: {mine[name]} now, {other.get(name)} then" for name in mine if mine[name] != other.get(name)]


def prepare_torch(settings: TrainSettings) -> None:
    """Set the numbers of threads and determinism for this process; before the first operation."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.deterministic:
        # cuBLAS is deterministic only with a fixed workspace.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)


def bit_settings(
    settings: TrainSettings, device: torch.device, ranks: int, dtype: str, fused: bool | None
) -> BitSettings:
    """Those of this run, now."""
    return BitSettings(
        torch=torch.__version__,
        numpy=np.__version__,
        machine=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        threads=torch.get_num_threads(),
        ranks=ranks,
        compile=settings.compile,
        deterministic=settings.deterministic,
        shard=settings.shard,
        micro_sequences=settings.micro_sequences,
        attention=settings.attention,
        dtype=dtype,
        fused=fused,
    )
