"""The draws and the writing of masked and block diffusion: one word of a Philox block for each
token, one for the level of each noised stretch.

A program is int64 numbers: DIFFUSION, the id of the mask, the lowest level, the tokens of a block
(0: the whole document is one), what fills up the last block (−1: nothing), and whether each block
stands twice, noised and clean. A level is a multiple of 2^-32, so the probability of a mask and the
weight 1 / level agree exactly. Writing costs one pass.
"""

import numpy as np

from penstock.core.compiled import inline_kernel, kernel_part
from penstock.core.randomness import below, philox
from penstock.core.vectors import copy_into, fill_with

DIFFUSION = 3
"""The kind of these programs."""
MASK, LOWEST, BLOCK, FILLING, COPIES = 1, 2, 3, 4, 5
"""Places in a program."""
LEVEL, HIDE = 4, 5
"""Purposes of the draws: word 0 of block number b is the level of noised stretch b; word i is
whether token i is masked.
"""
WHOLE = 2**32
"""A level of 1: every token is masked."""


@inline_kernel
def filled_length(program, length):
    """Tokens of a document with what fills up its last block."""
    block = program[BLOCK]
    if block == 0 or program[FILLING] < 0:
        return np.int64(length)
    return (np.int64(length) + block - 1) // block * block


@inline_kernel
def measure_diffusion(program, length):
    """Slots of a document of `length` tokens: the last block's clean copy is left out, as nothing
    comes behind it.
    """
    filled = filled_length(program, length)
    if not program[COPIES]:
        return filled
    return filled + (filled - 1) // program[BLOCK] * program[BLOCK]


@inline_kernel
def level_of(program, stretch, key):
    """The level of a noised stretch: uniform in (lowest, 1], as a multiple of 2^-32; uint64."""
    word, _, _, _ = philox(np.uint64(stretch), np.uint64(LEVEL), key)
    return np.uint64(WHOLE) - below(word, np.uint64(WHOLE - program[LOWEST]))


@inline_kernel
def diffusion_denominator(program, length, weights):
    """Sum of the loss weights of all tokens that may be masked, those that fill up a block among
    them: the expectation of the targets' weights.
    """
    more = filled_length(program, length) - length
    if len(weights) == 0:
        return np.float64(length + more)
    total = np.float64(more) * np.float64(weights[length - 1])
    for i in range(length):
        total += np.float64(weights[i])
    return total


@inline_kernel
def _noise_stretch(
    program, tokens, weights, key, begin, end, level, at, out_tokens, out_weights, out_targets
):
    """Write the tokens [begin, end) of a document, some of them masked, to the slots from `at` "
    "on."""
    length = len(tokens)
    scale = np.float64(WHOLE) / np.float64(level)
    words = philox(np.uint64(begin // 4), np.uint64(HIDE), key)
    for i in range(begin, end):
        if i % 4 == 0:
            words = philox(np.uint64(i // 4), np.uint64(HIDE), key)
        place = i % 4
        word = words[0]
        if place == 1:
            word = words[1]
        elif place == 2:
            word = words[2]
        elif place == 3:
            word = words[3]
        token = tokens[i] if i < length else np.int32(program[FILLING])
        weight = np.float32(1.0)
        if len(weights):
            weight = weights[min(i, length - 1)]
        slot = at + i - begin
        if weight != np.float32(0.0) and word < level:
            out_tokens[slot] = program[MASK]
            out_targets[slot] = token
            out_weights[slot] = np.float32(np.float64(weight) * scale)
        else:
            out_tokens[slot] = token
            out_targets[slot] = -100
            out_weights[slot] = np.float32(0.0)


@kernel_part
def write_diffusion(program, tokens, weights, key, out_tokens, out_weights, out_targets):
    """Write one document into exactly its measured slots; `weights` is empty if all are 1."""
    length = len(tokens)
    filled = filled_length(program, length)
    block = program[BLOCK] if program[BLOCK] else filled
    at = np.int64(0)
    for begin in range(0, filled, block):
        end = min(begin + block, filled)
        level = level_of(program, begin // block, key)
        _noise_stretch(
            program, tokens, weights, key, begin, end, level, at, out_tokens, out_weights,
            out_targets,
        )  # fmt: skip
        at += end - begin
        if program[COPIES] and end < filled:
            copy_into(tokens[begin:], out_tokens[at : at + block])
            fill_with(out_targets[at : at + block], -100)
            fill_with(out_weights[at : at + block], 0)
            at += block
