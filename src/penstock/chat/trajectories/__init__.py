"""Conversations with an engine whose sampled tokens are kept bit for bit: what to send next, and
what to train on.
"""
