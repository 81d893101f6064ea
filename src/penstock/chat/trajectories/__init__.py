"""Conversations with an engine whose sampled tokens are kept bit for bit: what to send next, and
what to train on.
"""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
