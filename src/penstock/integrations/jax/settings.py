"""A denoiser's settings as a pytree of integers, so that other settings of the same shapes need no new trace."""

from dataclasses import dataclass, field
from typing import Any, final

import jax
import numpy as np

from penstock.errors import ConfigError
from penstock.objectives import _denoise_kernels as k
from penstock.objectives.denoise import Denoise
from penstock.objectives.denoise_setup import LONGEST, check_capacity


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenoiseSettings:
    """What `denoise` needs of a `penstock.Denoise`, for documents of up to `max_length` tokens: K tasks, S sentinels.

    All but `max_length` is data to a jitted function. They are parts of the compiled writer's program, and its
    constants say what stands where (`penstock.objectives._denoise_kernels`).
    """

    max_length: int = field(metadata={"static": True})
    """Tokens of the longest document; a longer one could need more sentinels."""
    header: Any
    """int32 [8]: what holds for all tasks."""
    thresholds: Any
    """uint32 [K − 1]: the task is the number of thresholds that the first random word has reached."""
    tasks: Any
    """int32 [K, 8]."""
    sentinels: Any
    """int32 [S]: as many as a document of `max_length` can need, at least one."""

    @classmethod
    def of(cls, objective: Denoise, max_length: int) -> "DenoiseSettings":
        """The settings of an objective whose names are looked up, as NumPy arrays.

        Raises:
            ConfigError: `max_length` is out of range, names were not looked up, or there are fewer sentinels than a
                document of `max_length` can need.
        """
        if not 1 <= max_length <= LONGEST:
            raise ConfigError(f"{objective.name}: max_length is {max_length:,}; due: 1 … {LONGEST:,}")
        program = objective.program()
        check_capacity(objective, max_length, objective.name)
        needed = objective.worst(max_length)[1]
        header, tasks, sentinels = np.split(program, [k.HEADER, k.HEADER + k.TASK_FIELDS * len(objective.tasks)])
        tasks = tasks.reshape(-1, k.TASK_FIELDS)
        # The last task ends at 2^32, which no word reaches.
        thresholds = tasks[:-1, k.CUMULATIVE].astype(np.uint32)
        return cls(
            max_length=max_length,
            header=header.astype(np.int32),
            thresholds=thresholds,
            tasks=np.where(np.arange(k.TASK_FIELDS) == k.CUMULATIVE, 0, tasks).astype(np.int32),
            sentinels=np.resize(sentinels, needed).astype(np.int32) if needed else np.zeros(1, np.int32),
        )
