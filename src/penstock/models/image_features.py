"""Features of images that a frozen vision tower gives again and again, kept in a folder.

What a tower and its projector make of an image depends on their weights and the image alone, so
with both frozen it is computed once. Features are kept one file an image, under a digest of the
frozen weights, of the image's bytes and of how it is processed. Files are written whole or not at
all; a damaged one is an error that names it.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.core.errors import ConfigError, CorruptionError
from penstock.plan.inputs.torch_tensors import on_device

Parts = list[Tensor]
"""Features of one image: for the input, and for each layer that takes more of them; [slots or
tiles, …, width].
"""


@final
class FeatureCache:
    """A folder of features.

    Args:
        folder: Several runs may share it.
        weights: Those that features depend on, by name.

    Raises:
        ConfigError: One of them is trained.
    """

    def __init__(self, folder: str | Path, weights: Mapping[str, Tensor]) -> None:
        trained = next((name for name, weight in weights.items() if weight.requires_grad), None)
        if trained is not None:
            raise ConfigError(
                f"training.feature_cache: features of images depend on {trained}, which is "
                "trained; freeze the whole vision tower and its projector (training.frozen), "
                "or leave it out"
            )
        self._folder, self._weights = Path(folder), weights
        self.hits = self.misses = 0

    @cached_property
    def folder(self) -> Path:
        """That of these weights; only now, because a resumed run loads them late."""
        return self._folder / _digest(self._weights)

    def rows(
        self,
        keys: Sequence[bytes],
        slots: Sequence[int],
        compute: Callable[[], Sequence[Tensor]],
        device: torch.device,
    ) -> list[Tensor]:
        """Features of the images of a row.

        Args:
            keys: Of each image.
            slots: Of each image.
            compute: Gives the features of all of them together, where one is missing.
            device: The model's.

        Returns:
            As `compute`, joined over the images.

        Raises:
            CorruptionError: A file is damaged.
        """
        held = {key: self._read(key) for key in dict.fromkeys(keys)}
        if any(parts is None for parts in held.values()):
            self.misses += 1
            whole = compute()
            split = [_split(part, slots) for part in whole]
            for number, key in enumerate(keys):
                if held[key] is None:
                    held[key] = [parts[number].detach().cpu() for parts in split]
                    self._write(key, held[key] or [])
            return list(whole)
        self.hits += 1
        found = [parts for key in keys if (parts := held[key]) is not None]
        return [
            on_device(torch.cat([one[place] for one in found]), device)
            for place in range(len(found[0]))
        ]

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / f"{name[2:]}.safetensors"

    def _read(self, key: bytes) -> Parts | None:
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            tensors = load_file(path)
            stored = tensors.pop("sum")
            parts = [tensors[str(number)] for number in range(len(tensors))]
            if stored.tolist() != _sum(parts):
                raise ValueError("another checksum than was written")
        except (SafetensorError, KeyError, ValueError) as error:
            raise CorruptionError(
                f"{path}: the features are damaged ({error}); delete the file"
            ) from error
        return parts

    def _write(self, key: bytes, parts: Parts) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        save_file(
            {
                **{str(number): part.contiguous() for number, part in enumerate(parts)},
                "sum": torch.tensor(_sum(parts)),
            },
            partial,
        )
        os.replace(partial, path)


def features_of(outputs: Any) -> list[Tensor]:
    """What a tower of transformers gives, as tensors: the input's features, then those of further
    layers.
    """
    deep = getattr(outputs, "deepstack_features", None)
    return [_joined(part) for part in (outputs.pooler_output, *(deep or ()))]


def as_outputs(outputs: Any, parts: Sequence[Tensor]) -> object:
    """Features in the form of other outputs of the same tower, as a model of transformers takes it
    for pixels.
    """
    deep = getattr(outputs, "deepstack_features", None) or ()
    further = [_like(before, part) for before, part in zip(deep, parts[1:], strict=True)]
    return SimpleNamespace(
        pooler_output=_like(outputs.pooler_output, parts[0]), deepstack_features=further
    )


def _joined(part: Any) -> Tensor:
    found: Tensor = torch.cat(list(part)) if isinstance(part, list | tuple) else part
    return found


def _like(before: object, part: Tensor) -> object:
    return [part] if isinstance(before, list | tuple) else part


def _split(part: Tensor, slots: Sequence[int]) -> Sequence[Tensor]:
    """Features [slots, width], or [tiles, slots of a tile, width], of each image."""
    each = 1 if part.ndim == 2 else part.shape[1]
    counts = [count // each for count in slots]
    if sum(counts) != len(part) or any(count % each for count in slots):
        raise ConfigError(
            f"training.feature_cache: the tower gives features {list(part.shape)} for images "
            f"of {list(slots)} slots, which cannot be told apart; leave it out"
        )
    split: Sequence[Tensor] = part.split(counts)
    return split


def _sum(parts: Iterable[Tensor]) -> list[int]:
    """A checksum of tensors, as bytes."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return list(found.digest())


def _digest(weights: Mapping[str, Tensor]) -> str:
    """Hex digest of weights: names, dtypes and bytes."""
    found = hashlib.blake2b(digest_size=16)
    for name, weight in weights.items():
        found.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        found.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
