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
from penstock.plan.objectives._span_kernels import CHUNK_BLOCKS, draw_words

DIFFUSION = 3
"""The kind of these programs."""
MASK, LOWEST, BLOCK, FILLING, COPIES = 1, 2, 3, 4, 5
"""Places in a program."""
LEVEL, HIDE = 4, 5
"""Purposes of the draws: word 0 of block number b is the level of noised stretch b; a word for each
token is whether it is masked.
"""
CHUNK = 4 * CHUNK_BLOCKS
"""Tokens whose words are drawn at once."""
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
def words_size(length):
    """uint64 that `write_diffusion` works in for a document of up to `length` tokens, filled up."""
    return (length // CHUNK + 2) * CHUNK


@inline_kernel
def _draw_hiding(key, count, words):
    """The word of each of `count` tokens (uint64): of token i of a chunk of 256, word i // 64 of
    the chunk's block i % 64. So words stand in the order of tokens and become vectors.
    """
    for begin in range(0, count, CHUNK):
        # Whole vectors: a remainder would cost more than the blocks that are not needed.
        blocks = min((min(count - begin, CHUNK_BLOCKS) + 7) & ~7, CHUNK_BLOCKS)
        draw_words(begin >> 2, blocks, HIDE, key, words[begin : begin + CHUNK])


@inline_kernel
def _hide(mask, level, tokens, weights, words, out_tokens, out_weights, out_targets):
    """Mask the tokens with a loss weight whose words are below the level; `weights` may be empty:
    all are 1.
    """
    scale = np.float64(WHOLE) / np.float64(level)
    plain = np.float32(scale)
    if len(weights) == 0:
        for i in range(len(tokens)):
            token = tokens[i]
            hidden = np.int64(words[i]) < np.int64(level)
            out_tokens[i] = mask if hidden else token
            out_targets[i] = token if hidden else np.int32(-100)
            out_weights[i] = plain if hidden else np.float32(0)
        return
    for i in range(len(tokens)):
        token, weight = tokens[i], weights[i]
        hidden = (np.int64(words[i]) < np.int64(level)) & (weight != np.float32(0))
        out_tokens[i] = mask if hidden else token
        out_targets[i] = token if hidden else np.int32(-100)
        out_weights[i] = np.float32(np.float64(weight) * scale) if hidden else np.float32(0)


@inline_kernel
def _fill_up(program, level, weight, word, slot, out_tokens, out_weights, out_targets):
    """Write one of the tokens that fill up the last block."""
    token = np.int32(program[FILLING])
    hidden = np.int64(word) < np.int64(level) and weight != np.float32(0)
    scale = np.float64(WHOLE) / np.float64(level)
    out_tokens[slot] = np.int32(program[MASK]) if hidden else token
    out_targets[slot] = token if hidden else np.int32(-100)
    out_weights[slot] = np.float32(np.float64(weight) * scale) if hidden else np.float32(0)


@kernel_part
def write_diffusion(program, tokens, weights, key, out_tokens, out_weights, out_targets, words):
    """Write one document into exactly its measured slots; `weights` is empty if all are 1, `words`
    (uint64 [words_size(slots) or more]) is working memory.
    """
    length, mask = np.int64(len(tokens)), np.int32(program[MASK])
    filled = filled_length(program, length)
    block = program[BLOCK] if program[BLOCK] else filled
    _draw_hiding(key, filled, words)
    at = np.int64(0)
    for begin in range(0, filled, block):
        end = min(begin + block, filled)
        level = level_of(program, begin // block, key)
        last = min(end, length)
        count, own = last - begin, weights[begin:last] if len(weights) else weights
        here = slice(at, at + count)
        _hide(
            mask, level, tokens[begin:last], own, words[begin:last], out_tokens[here],
            out_weights[here], out_targets[here],
        )  # fmt: skip
        for i in range(last, end):
            weight = weights[length - 1] if len(weights) else np.float32(1)
            _fill_up(
                program,
                level,
                weight,
                words[i],
                at + i - begin,
                out_tokens,
                out_weights,
                out_targets,
            )
        at += end - begin
        if program[COPIES] and end < filled:
            copy_into(tokens[begin:], out_tokens[at : at + block])
            fill_with(out_targets[at : at + block], -100)
            fill_with(out_weights[at : at + block], 0)
            at += block
