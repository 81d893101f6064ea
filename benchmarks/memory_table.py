"""Memory of training, for the table of docs/how-to/memory-and-speed.md: no device is asked."""

import torch

from penstock.learn.training.computing import kept_bytes
from penstock.learn.training.settings import TrainSettings
from penstock.models.four_bits import BLOCK, SCALES_BLOCK
from penstock.models.ours.transformer import Transformer
from penstock.models.settings import ModelSettings

SLOTS = 8192
SHAPES = {
    "0.1B": ModelSettings(
        layers=12, width=768, heads=12, mlp_width=2048, vocab_size=32_000, tied=True
    ),
    "1B": ModelSettings(
        layers=16, width=2048, heads=32, kv_heads=8, mlp_width=8192, vocab_size=128_256, tied=True
    ),
    "8B": ModelSettings(
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        mlp_width=14_336,
        vocab_size=128_256,
        tied=False,
    ),
    "32B": ModelSettings(
        layers=64,
        width=5120,
        heads=64,
        kv_heads=8,
        head_width=128,
        mlp_width=25_600,
        vocab_size=151_936,
        tied=False,
    ),
}
"""Shapes of Llama 3 and Qwen 3."""


def numbers(settings: ModelSettings) -> list[float]:
    """GB of a model: all trained, over 8, with LoRA, with LoRA on 4 bits; activations without
    checkpoints and with.
    """
    with torch.device("meta"):
        model = Transformer(settings)
    count = sum(weight.numel() for weight in model.parameters())
    packed = sum(weight.numel() for weight in model.blocks.parameters() if weight.ndim == 2)
    each = 0.5 + 1 / BLOCK + 4 / (BLOCK * SCALES_BLOCK)
    four_bits = each * packed + 2 * (count - packed)
    kept = [
        SLOTS * kept_bytes(model, TrainSettings(activation_checkpointing=kind), torch.bfloat16)
        for kind in ("none", "selective", "full")
    ]
    return [one / 1e9 for one in (16 * count, 2 * count, 2 * count, four_bits, *kept)]


def main() -> None:
    """Print the table."""
    print(f"GB; rows of {SLOTS:,} slots in bfloat16")
    print("model  trained  over 8   LoRA     4 bits   none  selective  full")
    for name, settings in SHAPES.items():
        print(f"{name:5}", *(f"{one:8.1f}" for one in numbers(settings)))


if __name__ == "__main__":
    main()
