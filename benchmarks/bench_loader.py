"""The loader against its peers and its limit: tokens a second, one core, CPU time, data in memory.

The public path is what users write: `for step in ps.Loader(…): step.torch()`, all settings as they
come, from the plan to torch tensors in int64, checksums checked. A loop reads all arrays (tokens,
targets, loss weights, positions, document ids, cumulative lengths), or tokens and targets alone;
also while the last two steps are held, as a trainer that prefetches does, and row by row. Variants
name dtype and arrays. Each has its own mapping and order of documents, so none finds them in a
cache. Against it: nanoGPT's `get_batch` and torch's DataLoader over a mapped file, which make
tokens and targets and know no documents; Megatron's dataset and Grain, with `--peers`.

The fill is the kernel alone. It is held against two limits, which make one array of 8 bytes a token
where complete rows in int64 are four. NumPy's gather makes a batch of rows at random places of a
mapped file of tokens, as int64. The bare copy is the limit of the machine: the same rows from
memory into an array that exists, in the second-level cache all the time. Documents are Python's
standard library in tokens, ten times over, cut at lognormal lengths (mean 775): 90 MB.

    python benchmarks/bench_loader.py [--peers PYTHON]     # a Python with megatron-core and grain
"""

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from common import (
    Peer,
    against,
    arguments,
    cpu_seconds,
    lognormal_lengths,
    standard_library,
    table,
    take_turns,
)
from penstock.data.shards.format._kernels import CHUNK_TOKENS
from penstock.plan.loader import Plan, PlanSettings

SLOTS, ROWS = 4096, 8
STEPS, TURNS = 200, 5
LEAST_TOKENS = 45_000_000
"""90 MB, and 65 MB of them in the rows of all turns: more than a last-level cache of 32 MiB."""


def tokens_of(folder: Path) -> np.ndarray:
    """Token ids of the standard library, by a tokenizer trained on a part of it; so often that no
    cache holds them.
    """
    texts = standard_library(12_000_000)
    tokenizer = ps.train_tokenizer(
        texts[:150], vocab_size=8192, output=folder / "tokenizer", progress=False
    )
    tokens = np.concatenate([tokenizer.encode(text) for text in texts]).astype(np.uint16)
    return np.tile(tokens, -(-LEAST_TOKENS // len(tokens)))


def turns(items: list[Any]) -> Iterator[list[Any]]:
    """The items in parts of `STEPS`, again and again: each repeat of a work reads other data."""
    return cycle([items[begin : begin + STEPS] for begin in range(0, len(items), STEPS)])


def fill_work(dataset: ps.Dataset, distances: int, dtype: str = "int64") -> tuple[object, int]:
    """Work that fills planned steps, and the tokens it makes."""
    need = ps.InputRequirements(
        positions=True, document_ids=True, cu_seqlens=True, dtype=dtype, target_distances=distances
    )
    loader = ps.Loader(
        dataset, sequence_length=SLOTS, rows_per_step=ROWS, threads=0, requirements=need
    )
    plans = [loader._planner.next() for _ in range(TURNS * STEPS)]
    written, parts = loader._filling.fill.run_python(plans[0].pieces), turns(plans)
    # Whoever takes a row has all its arrays filled from then on.
    _ = loader._filling.fill.rows(plans[0].pieces, plans[0].row_starts, written)[0]

    def work() -> None:
        for plan in next(parts):
            loader._filling.fill.rows(plan.pieces, plan.row_starts, written)

    return work, sum(int(plan.pieces["tokens"].sum()) for plan in plans) // TURNS


TWO = ("tokens", "targets")
ALL = (*TWO, "loss_weights", "positions", "document_ids", "cu_seqlens", "max_seqlen")
NAMED = ps.InputRequirements(positions=True, document_ids=True, cu_seqlens=True, dtype="int64")
"""All arrays but loss weights, which follow from the targets."""


def whole(step: Any, names: Sequence[str] = ALL) -> list[Any]:
    """Those fields of a step as tensors."""
    tensors = step.torch()
    return [tensors[name] for name in names]


def public_work(
    dataset: ps.Dataset,
    take: Callable[[Any], Any],
    *,
    held: int = 0,
    need: ps.InputRequirements | None = None,
    numbers: Iterator[int] = count(),  # noqa: B008
) -> object:
    """Work that takes steps of a loader as a training loop does, and keeps the last `held` of what
    it took.
    """
    loader = ps.Loader(
        ps.open_dataset(dataset.path),
        sequence_length=SLOTS,
        rows_per_step=ROWS,
        seed=next(numbers),
        threads=0,
        requirements=need,
    )
    steps = iter(loader)
    kept: deque[Any] = deque(maxlen=held)

    def work() -> None:
        for _ in range(STEPS):
            kept.append(take(next(steps)))

    return work


def get_batch_work(file: Path) -> object:
    """nanoGPT's get_batch: tokens and targets of random places, stacked."""
    import torch

    mapped = np.load(file, mmap_mode="r")

    def work() -> None:
        for _ in range(STEPS):
            begins = torch.randint(len(mapped) - SLOTS - 1, (ROWS,))
            torch.stack([torch.from_numpy(mapped[i : i + SLOTS].astype(np.int64)) for i in begins])
            torch.stack(
                [torch.from_numpy(mapped[i + 1 : i + 1 + SLOTS].astype(np.int64)) for i in begins]
            )

    return work


def data_loader_work(file: Path) -> object:
    """torch's DataLoader over rows of a mapped file, in this process."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    mapped = np.load(file, mmap_mode="r")

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return (len(mapped) - 1) // SLOTS

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            row = torch.from_numpy(mapped[index * SLOTS : (index + 1) * SLOTS + 1].astype(np.int64))
            return row[:-1], row[1:]

    def endless() -> Any:
        while True:
            yield from DataLoader(Rows(), batch_size=ROWS, shuffle=True, drop_last=True)

    batches = endless()

    def work() -> None:
        for _ in range(STEPS):
            next(batches)

    return work


def consumer_lines(dataset: ps.Dataset, repeats: int) -> list[tuple[str, str, str]]:
    """What the loader costs a consumer that computes 13 ms a step: CPU time of its thread, and time
    on the wall.

    Over the same computation without a loader, for steps that it fills itself and for steps that a
    thread fills ahead.
    """
    import torch

    torch.set_num_threads(1)
    matrix, small = torch.rand(832, 832), torch.rand(64)

    def compute() -> None:
        _ = matrix @ matrix
        for _ in range(150):
            small.mul(1.0001)

    sources: dict[str, Any] = {"no loader": iter(int, 1)}
    for threads in (0, 1):
        loader = ps.Loader(dataset, sequence_length=SLOTS, rows_per_step=ROWS, threads=threads)
        sources[f"threads={threads}"] = (whole(step) for step in loader)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
    for _ in range(3 * repeats + 1):
        for name, steps in sources.items():
            cpu, wall = time.thread_time(), time.perf_counter()
            for _ in range(40):
                next(steps)
                compute()
            spent[name].append((time.thread_time() - cpu, time.perf_counter() - wall))
    medians = {name: np.median(found[1:], axis=0) for name, found in spent.items()}
    alone = medians["no loader"]
    note = f"of {1e3 * alone[0] / 40:.1f} ms a step"
    return [
        (
            f"a consumer's CPU; wall time, {name}",
            "; ".join(f"{100 * x:+.1f} %" for x in found / alone - 1),
            note,
        )
        for name, found in medians.items()
        if name != "no loader"
    ]


def places(tokens: np.ndarray) -> list[list[int]]:
    """Where rows begin, for each step of all turns."""
    return np.random.default_rng(0).integers(0, len(tokens) - SLOTS, (TURNS * STEPS, ROWS)).tolist()


def gather_work(file: Path) -> object:
    mapped = np.load(file, mmap_mode="r")
    parts = turns(places(mapped))

    def work() -> None:
        for rows in next(parts):
            np.stack([mapped[start : start + SLOTS] for start in rows]).astype(np.int64)

    return work


def copy_work(tokens: np.ndarray) -> object:
    parts = turns(places(tokens))
    out = np.empty((ROWS, SLOTS), np.int64)

    def work() -> None:
        for rows in next(parts):
            for row, start in enumerate(rows):
                out[row] = tokens[start : start + SLOTS]

    return work


def checked_over_used(dataset: ps.Dataset, packing: str) -> float:
    """Tokens whose checksums are computed over tokens that rows hold, from the pieces of a plan."""
    loader = ps.Loader(
        dataset, sequence_length=SLOTS, rows_per_step=ROWS, threads=0, packing=packing
    )
    pieces = np.concatenate([loader._planner.next().pieces for _ in range(STEPS)])
    begin, count = pieces["begin"], pieces["tokens"]
    length = dataset.table.lengths[pieces["document"], 0].astype(np.int64)
    first = begin // CHUNK_TOKENS * CHUNK_TOKENS
    read = np.minimum(begin + count + 1, length)
    last = np.minimum(-(-read // CHUNK_TOKENS) * CHUNK_TOKENS, length)
    return float((last - first).sum() / count.sum())


RANKS = 1024


def rank_work(folder: Path) -> tuple[object, int]:
    """Work that plans steps as a rank of 1,024 does, 8 rows for each; and the steps.

    A million documents, whose lengths do not fit the second-level cache: rows of 512 slots hold as
    many of them as rows of 4,096 of web text, without as many tokens on disk.
    """
    ids, lengths = (
        np.arange(512, dtype=np.uint16),
        lognormal_lengths(1_000_000, mean=97, largest=512),
    )
    dataset = ps.write_dataset(
        folder / "many", (ids[:length] for length in lengths), vocab_size=512
    )
    loader = ps.Loader(
        dataset, sequence_length=512, rows_per_step=8 * RANKS, threads=0, data_parallel=(0, RANKS)
    )
    for _ in range(3):
        loader._planner.next()

    def work() -> None:
        for _ in range(STEPS):
            loader._planner.next()

    return work, STEPS


def plan_work(dataset: ps.Dataset, tokens: int) -> object:
    """Work that plans windows of about `tokens` tokens from a blend of two sources."""
    mixture = ps.Mixture([ps.Source(dataset, 0.7, "a"), ps.Source(dataset, 0.3, "b")])
    plan = Plan(
        mixture, [dataset, dataset], PlanSettings(sequence_length=SLOTS, rows_per_step=ROWS)
    )
    for _ in range(8):
        plan.next_window()

    def work() -> None:
        first = plan.state().row
        while (plan.state().row - first) * SLOTS < tokens:
            plan.next_window()

    return work


def main() -> None:
    flags = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = tokens_of(folder)
        ends = np.cumsum(lognormal_lengths(len(tokens) // 700))
        documents = np.split(tokens, ends[ends < len(tokens)])
        dataset = ps.write_dataset(folder / "data", documents, vocab_size=8192)
        np.save(folder / "tokens.npy", tokens)
        one, one_tokens = fill_work(dataset, 1)
        three, three_tokens = fill_work(dataset, 3)
        narrow, narrow_tokens = fill_work(dataset, 1, "int32")
        planned = 4_000_000
        wide, wide_steps = rank_work(folder)
        gather, copy, plan = (
            gather_work(folder / "tokens.npy"),
            copy_work(tokens),
            plan_work(dataset, planned),
        )
        public = {
            "steps to torch": public_work(dataset, whole),
            "steps to torch, 2 held": public_work(dataset, whole, held=2),
            "steps to torch, tokens and targets": public_work(
                dataset, lambda step: whole(step, TWO)
            ),
            "variant: arrays named, int64": public_work(
                dataset, lambda step: [*step.torch().values()], need=NAMED
            ),
            "variant: tokens and targets named, int64": public_work(
                dataset,
                lambda step: whole(step, TWO),
                need=ps.InputRequirements(dtype="int64"),
            ),
            "variant: step.arrays(), int32, all": public_work(
                dataset, lambda step: [step.arrays()[name] for name in ALL]
            ),
            "rows to torch": public_work(dataset, lambda step: [ps.to_torch(row) for row in step]),
            "nanoGPT's get_batch": get_batch_work(folder / "tokens.npy"),
            "torch's DataLoader": data_loader_work(folder / "tokens.npy"),
        }
        rivals = {
            **{what: lambda work=work: cpu_seconds(work) for what, work in public.items()},
            "gather": lambda: cpu_seconds(gather),
            "copy": lambda: cpu_seconds(copy),
            "fill": lambda: cpu_seconds(one),
            "fill, 3 distances": lambda: cpu_seconds(three),
            "fill, int32": lambda: cpu_seconds(narrow),
            "plan": lambda: cpu_seconds(plan),
            "plan, 1,024 ranks": lambda: cpu_seconds(wide),
        }
        made = {
            **dict.fromkeys(public, STEPS * ROWS * SLOTS),
            "gather": STEPS * ROWS * SLOTS,
            "copy": STEPS * ROWS * SLOTS,
            "fill": one_tokens,
            "fill, 3 distances": three_tokens,
            "fill, int32": narrow_tokens,
            "plan": planned,
            "plan, 1,024 ranks": wide_steps * 8 * RANKS * 512,
        }
        peers: dict[str, Peer] = {}
        if flags.peers:
            np.save(folder / "lengths.npy", np.array([len(document) for document in documents]))
            for script in ("megatron_gpt", "grain_concat"):
                peers[script] = Peer(flags.peers, f"{script}.py", name, str(SLOTS))
        rivals.update(peers)
        seconds = take_turns(rivals, flags.repeats)
        made.update({script: peer.last["tokens"] for script, peer in peers.items()})
        rate = {script: made[script] / spent for script, spent in seconds.items()}
        rows = [(script, f"{value / 1e6:,.0f} M/s", "") for script, value in rate.items()]
        rows += [
            ("fill / gather", f"{rate['fill'] / rate['gather']:.2f}", "target: ≥ 0.6"),
            (
                "fill with 3 distances / gather",
                f"{rate['fill, 3 distances'] / rate['gather']:.2f}",
                "target: ≥ 0.45",
            ),
            ("fill / bare copy", f"{rate['fill'] / rate['copy']:.2f}", ""),
            (
                "fill with 3 distances / bare copy",
                f"{rate['fill, 3 distances'] / rate['copy']:.2f}",
                "",
            ),
            (
                "fill in int32, the default / bare copy",
                f"{rate['fill, int32'] / rate['copy']:.2f}",
                "",
            ),
            ("plan / fill", f"{rate['plan'] / rate['fill']:.2f}", "target: ≥ 2"),
            (
                "plan of a step of 8,192 rows (1,024 ranks)",
                f"{1e3 * seconds['plan, 1,024 ranks'] / wide_steps:.2f} ms",
                "target: ≤ 4 ms",
            ),
        ]
        for rival, target, of_two in (
            ("nanoGPT's get_batch", 1.2, 2),
            ("torch's DataLoader", 1.2, 2),
            ("megatron_gpt", 15, None),
            ("grain_concat", 40, None),
        ):
            same = () if of_two is None else ("steps to torch, tokens and targets",)
            for ours in (
                ("steps to torch", "steps to torch, 2 held", *same) if rival in rate else ()
            ):
                ratio = rate[ours] / rate[rival]
                goal = of_two if ours in same else target
                rows.append((f"{ours} / {rival}", f"{ratio:.2f}", f"target: ≥ {goal}"))
                against("Data", ours, rival, ours=1 / rate[ours], theirs=1 / rate[rival])
        for packing in ("best_fit", "concat"):
            rows.append(
                (
                    f"tokens checked / used, {packing}",
                    f"{checked_over_used(dataset, packing):.3f}",
                    "target: ≤ 1.1",
                )
            )
        rows += consumer_lines(dataset, flags.repeats)
        table(f"rows of {SLOTS} tokens, tokens a second", rows)


if __name__ == "__main__":
    begun = time.monotonic()
    main()
    print(f"\n{time.monotonic() - begun:.0f} s")
