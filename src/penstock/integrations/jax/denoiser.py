"""Denoising batches of documents on the device, with the checks that only the host can make."""

from functools import partial
from typing import Any, final

import jax
import numpy as np

from penstock.errors import ConfigError
from penstock.integrations.jax.denoising import Denoised, denoise
from penstock.integrations.jax.settings import DenoiseSettings
from penstock.objectives.denoise import Denoise


def split_keys(keys: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """uint32 [n, 2], the low and the high half of 64-bit keys [n], which JAX without x64 has no type for."""
    keys = np.asarray(keys, np.uint64)
    return np.stack([keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)], axis=-1).astype(np.uint32)


@partial(jax.jit, static_argnames="max_slots")
def denoise_batch(
    tokens: Any, lengths: Any, keys: Any, settings: DenoiseSettings, weights: Any = None, *, max_slots: int
) -> Denoised:
    """`denoise` of [B, T] tokens and weights with [B] lengths and [B, 2] keys; all that comes out has a leading [B]."""
    each = jax.vmap(partial(denoise, max_slots=max_slots), in_axes=(0, 0, 0, None, 0))
    written: Denoised = each(tokens, lengths, keys, settings, weights)
    return written


@final
class Denoiser:
    """A `penstock.Denoise` on the device, for documents of up to `max_length` tokens, one trace for each batch size.

    ```python
    denoiser = psj.Denoiser(objective, max_length=2048)     # names looked up: objective.resolve(facts), or ids
    written = denoiser(tokens, lengths, keys)               # int32 [B, 2048], [B], 64-bit keys [B]
    ```

    Inside a jitted function of yours, call `denoise` or `denoise_batch` with its `settings` and `max_slots`, and
    compare the `slots` that come back.

    Args:
        objective: What to do.
        max_length: T, tokens of the longest document.
        max_slots: M, slots of what is written; as many as a document of `max_length` can take when None.

    Raises:
        ConfigError: `max_length` is out of range, names were not looked up, or there are fewer sentinels than a
            document of `max_length` can need.
    """

    def __init__(self, objective: Denoise, *, max_length: int, max_slots: int | None = None) -> None:
        self.objective, self.max_length = objective, max_length
        self.settings: DenoiseSettings = jax.device_put(DenoiseSettings.of(objective, max_length))
        self.max_slots = objective.worst(max_length)[0] if max_slots is None else max_slots

    def __call__(self, tokens: Any, lengths: Any, keys: Any, weights: Any = None) -> Denoised:
        """Denoise a batch.

        Args:
            tokens: int32 [B, max_length], each document first in its row; what comes after it is not looked at.
            lengths: [B] tokens of each document, on the host.
            keys: uint64 [B], on the host.
            weights: float32 [B, max_length], how much each token counts where it is a target; None = 1.

        Raises:
            ConfigError: A document is longer than `max_length`, empty, or takes more than `max_slots`: names it.
        """
        lengths, keys = np.asarray(lengths, np.int64), np.asarray(keys, np.uint64)
        if np.shape(tokens) != (len(lengths), self.max_length) or keys.shape != lengths.shape:
            raise ConfigError(
                f"Denoiser: tokens are {list(np.shape(tokens))}, lengths {list(lengths.shape)}, keys "
                f"{list(keys.shape)}; due: [B, {self.max_length}], [B] and [B]"
            )
        self._refuse(lengths, (lengths < 1) | (lengths > self.max_length), "tokens", f"1 … {self.max_length}")
        slots = self.objective.measure(lengths, keys)
        self._refuse(slots, slots > self.max_slots, "slots", f"{self.max_slots} at most; raise max_slots")
        written: Denoised = denoise_batch(
            tokens, lengths.astype(np.int32), split_keys(keys), self.settings, weights, max_slots=self.max_slots
        )
        return written

    def _refuse(self, numbers: Any, wrong: Any, what: str, due: str) -> None:
        if wrong.any():
            first = int(np.argmax(wrong))
            raise ConfigError(f"Denoiser: document {first} of the batch has {numbers[first]} {what}; due: {due}")
