"""LoRA: its settings, adding and merging it, other weights trained next to it, and its export."""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
