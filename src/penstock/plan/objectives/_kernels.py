"""The built-in objectives, compiled: one measuring kernel and one writing kernel for all of them.

A program is a resolved objective as int64 numbers; its first number selects the objective.
"""

from penstock.core.compiled import inline_kernel, kernel_part
from penstock.plan.objectives._denoise_kernels import measure_denoise, write_denoise
from penstock.plan.objectives._diffusion_kernels import (
    DIFFUSION,
    diffusion_denominator,
    measure_diffusion,
    write_diffusion,
)
from penstock.plan.objectives._infill_kernels import measure_infill, write_infill

DENOISE = 1


@inline_kernel
def measure_document(program, length, key):
    """(slots, prefix, leading tokens that are input only) of a document of `length` tokens, in
    constant time.
    """
    if program[0] == DENOISE:
        return measure_denoise(program, length, key)
    if program[0] == DIFFUSION:
        slots = measure_diffusion(program, length)
        return slots, slots, slots
    return measure_infill(program, length, key)


@inline_kernel
def document_denominator(program, length, weights):
    """What a document adds to the denominator if its targets are its own; `weights` float32
    [length], or [0] if all are 1.
    """
    if program[0] == DIFFUSION:
        return diffusion_denominator(program, length, weights)
    return 0.0


@kernel_part
def write_document(program, tokens, weights, key, out_tokens, out_weights, out_targets, memory):
    """Rewrite one document.

    Args:
        program: Program of the objective.
        tokens: int32 [n].
        weights: float32 [n], or [0] if every target counts 1.
        key: uint64.
        out_tokens: int32 [slots], written.
        out_weights: float32 [slots] or [0], written.
        out_targets: int32 [slots], written if the objective's targets are its own.
        memory: uint64 [memory_size(slots) or more], working memory.
    """
    if program[0] == DENOISE:
        write_denoise(program, tokens, weights, key, out_tokens, out_weights, memory)
    elif program[0] == DIFFUSION:
        write_diffusion(program, tokens, weights, key, out_tokens, out_weights, out_targets, memory)
    else:
        write_infill(program, tokens, weights, key, out_tokens, out_weights)
