"""Denoising against a bare copy, T5's algorithm in NumPy and a jitted JAX function: CPU time, one
core, same documents.

The documents have lognormal lengths (mean 775, at most 2,048 tokens), the mixture is UL2R's. The
copy is a compiled loop that puts each document's stored 2-byte ids into rows of int32: what any
loader must do. NumPy and JAX treat one document a call, as a `map` over a dataset does; JAX pads to
a static length, because shapes must not change.

    python benchmarks/bench_objectives.py [--repeats N]     # jax is left out where it is not installed
"""  # noqa: E501

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from common import against, arguments, cpu_seconds, lognormal_lengths, table, take_turns
from peers.jax_denoise import jitted_denoiser
from peers.numpy_denoise import numpy_denoiser
from penstock.core.compiled import kernel
from penstock.core.vectors import copy_into
from penstock.plan.inputs.requirements import EVERYTHING
from penstock.plan.objectives._denoise_kernels import memory_size, write_denoise

SLOTS, ROWS, LONGEST = 4096, 8, 2048
DOCUMENTS, REFERENCE_DOCUMENTS = 4000, 200
SENTINELS = range(60_000, 60_400)
DIFFUSION = {
    "masked diffusion": ps.MaskedDiffusion(mask_token=60_001),
    "block diffusion, copies": ps.BlockDiffusion(mask_token=60_001),
    "block diffusion, prefix": ps.BlockDiffusion(mask_token=60_001, form="prefix"),
}
OBJECTIVE = ps.Denoise.ul2r(modes={"R": 59_997, "X": 59_998, "S": 59_999}, sentinels=SENTINELS)


@kernel
def _copy_documents(stored, offsets, out):
    for document in range(len(offsets) - 1):
        begin, end = offsets[document], offsets[document + 1]
        copy_into(stored[begin:end], out[begin:end])


@kernel
def _write_documents(program, tokens, offsets, keys, ends, out, nothing):
    memory = np.empty(memory_size(LONGEST), np.uint64)
    for document in range(len(keys)):
        words = tokens[offsets[document] : offsets[document + 1]]
        new = out[ends[document] : ends[document + 1]]
        write_denoise(program, words, nothing, keys[document], new, nothing, memory)


def rows_work(dataset: Any, objective: Any) -> tuple[Callable[[], None], int]:
    """Work that fills planned steps (tokens, targets, weights, prefixes), and the document tokens
    in them.
    """
    source = ps.Source(dataset, name="text", objective=objective)
    need = replace(EVERYTHING, trees=True)
    loader = ps.Loader(
        ps.Mixture([source]),
        sequence_length=SLOTS,
        rows_per_step=ROWS,
        threads=0,
        requirements=need,
    )
    plans = [loader._planner.next() for _ in range(60)]

    def work() -> None:
        for plan in plans:
            loader._filling.fill.rows(
                plan.pieces, plan.row_starts, loader._filling.fill.run_python(plan.pieces)
            )

    return work, sum(int(plan.pieces["tokens"].sum()) for plan in plans)


def kernel_work(
    tokens: np.ndarray, offsets: np.ndarray
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A bare copy of all documents, and the denoising of all."""
    keys = np.arange(len(offsets) - 1, dtype=np.uint64)
    ends = np.concatenate(([0], np.cumsum(OBJECTIVE.measure(np.diff(offsets), keys))))
    copied, written = np.empty(len(tokens), np.int32), np.empty(ends[-1], np.int32)
    program, stored, nothing = (
        OBJECTIVE.program(),
        tokens.astype(np.uint16),
        np.empty(0, np.float32),
    )

    def copy() -> None:
        _copy_documents(stored, offsets, copied)

    def write() -> None:
        _write_documents(program, tokens, offsets, keys, ends, written, nothing)

    return copy, write


def main() -> None:
    flags = arguments(__doc__).parse_args()
    lengths = lognormal_lengths(DOCUMENTS, largest=LONGEST)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.random.default_rng(0).integers(0, 50_000, offsets[-1]).astype(np.int32)
    documents = np.split(tokens, offsets[1:-1])
    few = documents[:REFERENCE_DOCUMENTS]
    copy, write = kernel_work(tokens, offsets)
    works: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (copy, len(tokens)),
        "documents denoised": (write, len(tokens)),
        "NumPy, a document a call": (numpy_denoiser(few, SENTINELS), sum(map(len, few))),
    }
    jitted = jitted_denoiser(few, SENTINELS, LONGEST)
    if jitted is not None:
        works["JAX, a document a call"] = jitted, sum(map(len, few))
    with tempfile.TemporaryDirectory() as folder:
        stored = [document.astype(np.uint16) for document in documents]
        dataset = ps.write_dataset(Path(folder) / "data", stored, vocab_size=60_500)
        works["rows, causal"] = rows_work(dataset, ps.Causal())
        works["rows, denoised"] = rows_work(dataset, OBJECTIVE)
        for name, objective in DIFFUSION.items():
            works[f"rows, {name}"] = rows_work(dataset, objective)
        seconds = take_turns(
            {name: lambda work=work: cpu_seconds(work) for name, (work, _) in works.items()},
            flags.repeats,
        )
    cost = {name: seconds[name] / made * 1e9 for name, (_, made) in works.items()}
    rows = [(name, f"{value:,.2f} ns", "a token of the documents") for name, value in cost.items()]
    rows.append(
        ("documents denoised / copy", f"{cost['documents denoised'] / cost['copy']:.1f}", "")
    )
    rows.append(
        ("rows, denoised / copy", f"{cost['rows, denoised'] / cost['copy']:.1f}", "target: ≤ 10")
    )
    rows += [
        (f"{name} / rows, denoised", f"{cost[name] / cost['rows, denoised']:,.0f}", "target: ≥ 20")
        for name in cost
        if name.endswith("a call")
    ]
    rows += [
        (
            f"rows, {name} / rows, causal",
            f"{cost[f'rows, {name}'] / cost['rows, causal']:.1f}",
            goal,
        )
        for name, goal in zip(DIFFUSION, ("target: ≤ 3", "two slots a token", ""), strict=True)
    ]
    for name in cost:
        if name.endswith("a call"):
            against(
                "Data", "denoised rows (UL2R)", name, ours=cost["rows, denoised"], theirs=cost[name]
            )
    table("UL2R, per token", rows)


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    main()
