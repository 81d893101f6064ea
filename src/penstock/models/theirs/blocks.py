"""The blocks of a model of transformers: the layers of its text decoder, found by rule.

Computation in another dtype, activation checkpoints, compiling and sharding all work block by
block. A model does not say which of its modules these are, but all decoders of transformers keep
them in one list whose length is the number of layers of their settings, and whose elements share
the base class that transformers checkpoints by. Models of an older or other build have no such
list; they train without these four.
"""

from typing import TYPE_CHECKING

from torch import nn

from penstock.models.isolation.lengths import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOWERS = ("vision", "visual", "image", "video", "audio", "speech", "tower", "patch")
"""Parts of the names of modules that read media."""


def find_blocks(inner: "PreTrainedModel") -> list[nn.Module]:
    """The layers of the text decoder, in order; empty: they cannot be told apart by the rule."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    config = text_config(inner)
    layers = getattr(config, "num_hidden_layers", None)
    found = [
        module
        for name, module in inner.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == layers
        and not any(word in name.lower() for word in _TOWERS)
        and all(isinstance(block, GradientCheckpointingLayer) for block in module)
    ]
    return list(found[0]) if len(found) == 1 else []
