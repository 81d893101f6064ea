"""Corpora of other programs, read where they lie: Megatron and bare tokens."""
