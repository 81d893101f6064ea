"""What prefix trees save: steps, stored bytes, and TRL's DPO on the same pairs.

    python benchmarks/bench_trees.py [--threads 1] [--oasst FILE --tokenizer FOLDER --template FILE]
    [--peers PYTHON] [--round FOLDER]

The same answers, stored as trees and each by itself, through the same trainer's loss: `simpo` for
pairs, on-policy GRPO for groups, so that no reference model blurs the ratio. A transformer of 4
layers of 256, 4 heads, float32, rows of about 4,096 slots. "Trunk": forward and backward without
the head, the loss and the optimizer. "Step": all of a step of the trainer but the optimizer, with a
head of 8,192 ids. CPU time; rivals in turn. The slot ratio is what a tree can save at best. With
--oasst, ranked replies of real conversations; with --peers, TRL's DPOTrainer on the best and the
worst reply of each question, padded, 4 pairs a batch, which computes the same loss (compared
first). With --round, the dataset of a round of rollouts, such as `round-1/data` of
`examples/calculator.py`: its groups as trees and each path apart, which must have the same loss.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

import penstock as ps
from common import Peer, against, arguments, cpu_seconds, table, take_turns
from penstock.chat import TrajectoryReader
from penstock.data.shards import build_tree
from penstock.data.shards.dataset import Dataset
from penstock.data.shards.memory import weight_spans
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.path_settings import PolicySettings, PreferenceSettings
from penstock.learn.training.path_training import PathTraining, Reference
from penstock.learn.training.settings import TrainSettings
from penstock.models.exporting import export

MODEL = {"layers": 4, "width": 256, "heads": 4}
VOCAB, SLOTS = 8192, 4096
SHAPES = {
    "pairs, 300 + 2 × 200": (300, 200, 2, 20, 1.3),
    "groups of 8, prompt = answer (200)": (200, 200, 8, 4, 1.4),
    "groups of 8, prompt four times the answer": (800, 200, 8, 2, 2.6),
}
"""Tokens of the prompt, of an answer, answers, documents, and the goal."""
ROUND = 127
"""Trajectories of a round whose steps are timed, with the others of their groups."""
STORED, PAIRS = 400, 24
"""Documents whose bytes are counted; real pairs whose steps are timed."""
CPU = Ranks(torch.device("cpu"))


def write(folder: Path, groups: list[tuple[int, list[list[int]]]], share: bool) -> Dataset:
    """A dataset of (prompt tokens, paths), the first path the best."""
    made = [
        build_tree(
            paths,
            [[0.0] * prompt + [1.0] * (len(path) - prompt) for path in paths],
            values={
                "rank": list(range(len(paths))),
                "reward": [float(number % 2) for number in range(len(paths))],
            },
            share=share,
        )
        for prompt, paths in groups
    ]
    return ps.write_dataset(
        folder,
        [one.tokens for one in made],
        spans=[weight_spans(one.loss_weights) for one in made],
        trees=[one.tree for one in made],
        vocab_size=VOCAB,
    )


def random_groups(
    prompt: int, answer: int, count: int, documents: int
) -> list[tuple[int, list[list[int]]]]:
    draw = np.random.default_rng(0)
    groups = []
    for _ in range(documents):
        start = draw.integers(0, VOCAB, prompt).tolist()
        groups.append(
            (prompt, [start + draw.integers(0, VOCAB, answer).tolist() for _ in range(count)])
        )
    return groups


def compare_round(folder: str, repeats: int) -> list[Any]:
    """Steps over the trajectories of a round of rollouts, from the records next to its dataset."""
    reader = TrajectoryReader(tokenizer=ps.load_tokenizer(f"{folder}/tokenizer"), variables={})
    lines = Path(f"{folder}.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    found = [reader.read(json.loads(line), folder) for line in lines]
    groups = {one.group for one in found[: 1 + ROUND]}
    found = [one for one in found if one.group in groups]
    with tempfile.TemporaryDirectory() as name:
        data = {
            which: ps.write_trajectories(
                f"{name}/{which}", found, tokenizer=reader.tokenizer, share=which == "tree"
            )
            for which in ("tree", "apart")
        }
        tree = data["tree"]
        slots = data["apart"].num_tokens / tree.num_tokens
        lines = [("slots", f"{slots:.2f} ×", f"{data['apart'].num_tokens:,}, {tree.num_tokens:,}")]
        for what, trunk in (("trunk", True), ("step", False)):
            sums: dict[str, list[float]] = {one: [] for one in data}
            runs = {one: rivals(given, False, trunk, sums[one]) for one, given in data.items()}
            # Both orders, so that none is always the second.
            again = {f"{one} again": runs[one] for one in reversed(runs)}
            spent = take_turns({**runs, **again}, repeats)
            ratio = (spent["apart"] + spent["apart again"]) / (spent["tree"] + spent["tree again"])
            lines.append((f"  {what}", f"{ratio:.2f} ×", f"{ratio / slots:.2f} of the slot ratio"))
    difference = abs(sums["tree"][0] / sums["apart"][0] - 1)
    assert difference < 1e-5, sums
    return [*lines, ("  loss", f"{difference:.0e}", "relative difference")]


def rivals(
    dataset: Dataset,
    pairs: bool,
    trunk: bool,
    sums: list[float] | None = None,
) -> Callable[[], float]:
    """CPU seconds of a pass over all documents of a dataset; to `sums`, the sum of its losses."""
    model = ps.build_model(vocab_size=VOCAB, **MODEL)
    # Rows without padding, which would cost one of the two more than the other.
    sizes = np.unique(dataset.table.lengths[:, 0])
    slots = int(sizes[0]) * max(1, SLOTS // int(sizes[0])) if len(sizes) == 1 else SLOTS
    loader = ps.Loader(
        ps.Source(dataset, name="x", shuffle="none", max_epochs=1),
        sequence_length=slots,
        rows_per_step=1,
        requirements=model.requirements(),
        threads=0,
    )
    settings = TrainSettings(
        preference=PreferenceSettings(kind="simpo") if pairs else None,
        policy=None if pairs else PolicySettings(),
    )
    training = PathTraining(model, loader, settings, torch.device("cpu"))
    steps = list(loader)

    def run() -> float:
        spent = total = 0.0
        for step in steps:
            rows = list(step)
            tensors = [model.tensors(row) for row in rows]
            begun = time.process_time()
            if trunk:
                for each in tensors:
                    model(each).sum().backward()
            else:
                training.begin(rows, step, CPU)
                found = [training.backward(row) for row in rows]
                # Steps hold other groups in each dataset, so sums are compared.
                total += float(sum(found)) * training.divisor
            spent += time.process_time() - begun
            model.zero_grad()
        if sums is not None:
            sums.append(total)
        return spent

    return run


def compare(
    name: str, groups: list[tuple[int, list[list[int]]]], pairs: bool, goal: float, repeats: int
) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        tree, apart = (write(Path(folder) / str(share), groups, share) for share in (True, False))
        slots = apart.num_tokens / tree.num_tokens
        # Of many documents: a file's own head takes a few kilobytes.
        many = groups * (1 + STORED // len(groups))
        size = [
            write(Path(folder) / f"many-{share}", many, share).manifest.shards[0].bytes
            for share in (True, False)
        ]
        lines = [
            (
                name,
                f"{slots:.2f} ×",
                f"slot ratio: {tree.num_tokens:,} slots for {apart.num_tokens:,}",
            )
        ]
        for what, trunk in (("trunk", True), ("step", False)):
            seconds = take_turns(
                {"tree": rivals(tree, pairs, trunk), "apart": rivals(apart, pairs, trunk)}, repeats
            )
            ratio = seconds["apart"] / seconds["tree"]
            due = f"; goal {goal}" if not trunk else ""
            lines.append(
                (f"  {what}", f"{ratio:.2f} ×", f"{ratio / slots:.2f} of the slot ratio{due}")
            )
        stored = size[1] / size[0]
        lines.append(
            (
                "  stored bytes",
                f"{stored:.2f} ×",
                f"{stored / slots:.2f} of the slot ratio; goal 0.95",
            )
        )
    return lines


def oasst_pairs(
    file: str, tokenizer: str, template: str, most: int
) -> list[tuple[int, list[list[int]]]]:
    """The best and the worst reply of each question as (prompt tokens, paths of at most `most`
    tokens), shuffled.
    """
    with tempfile.TemporaryDirectory() as folder:
        ps.prepare(
            file,
            tokenizer=tokenizer,
            template=template,
            output=f"{folder}/d",
            answers="tree",
            oasst_paths="ranked",
            progress=False,
        )
        groups = []
        for document in ps.open_dataset(f"{folder}/d"):
            tree = document.tree
            order = np.argsort(tree.value("rank"), kind="stable").tolist()
            slots = [tree.slots(path) for path in (order[0], order[-1])]
            # The first trained target of any path: what stands before it is the prompt.
            prompt = min(
                int(np.argmax(document.loss_weights[one[:-1] + 1] != 0)) + 1 for one in slots
            )
            paths = [document.tokens[one] % VOCAB for one in slots]
            if max(map(len, paths)) <= most:
                groups.append((prompt, [path.tolist() for path in paths]))
    Random(0).shuffle(groups)
    return groups


def against_trl(
    python: str, groups: list[tuple[int, list[list[int]]]], repeats: int, threads: int
) -> list[Any]:
    """DPO by TRL with padding, 4 pairs a batch; the same pairs through ours. Both with a frozen
    reference model.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {
            one: ps.build_model(vocab_size=VOCAB, seed=seed, init_std=0.1, **MODEL)
            for one, seed in (("policy", 1), ("reference", 2))
        }
        for one, model in models.items():
            export(model, folder / one)
        pairs = [
            {
                "prompt_ids": paths[0][:prompt],
                "chosen_ids": paths[0][prompt:],
                "rejected_ids": paths[1][prompt:],
            }
            for prompt, paths in groups
        ]
        (folder / "pairs.json").write_text(json.dumps(pairs))
        peer = Peer(python, "trl_preference.py", str(folder), "4", str(threads))
        data = write(folder / "data", groups, share=True)
        model = models["policy"]
        loader = ps.Loader(
            ps.Source(data, name="x", shuffle="none", max_epochs=1),
            sequence_length=2048,
            rows_per_step=1,
            requirements=model.requirements(),
            threads=0,
        )

        def loss_of(kind: str, smoothing: float = 0.0) -> float:
            """Mean over the first four pairs, as TRL reports for its first batch."""
            first = write(folder / f"first-{kind}", groups[:4], share=True)
            few = ps.Loader(
                ps.Source(first, shuffle="none", max_epochs=1),
                sequence_length=8192,
                rows_per_step=1,
                requirements=model.requirements(),
                threads=0,
            )
            settings = TrainSettings(
                preference=PreferenceSettings(kind=kind, label_smoothing=smoothing)
            )
            training = PathTraining(model, few, settings, torch.device("cpu"), reference)
            (step,) = list(few)
            training.begin(list(step), step, CPU)
            return sum(float(training.loss(row)[0].detach()) for row in step)

        reference = Reference("initial", models["reference"], torch.device("cpu"))
        training = PathTraining(
            model,
            loader,
            TrainSettings(preference=PreferenceSettings()),
            torch.device("cpu"),
            reference,
        )
        steps = list(loader)

        def run() -> float:
            begun = time.process_time()
            for step in steps:
                training.begin(list(step), step, CPU)
                for row in step:
                    training.backward(row)
            model.zero_grad()
            return time.process_time() - begun

        seconds = take_turns({"ours": run, "trl": peer}, repeats)
        theirs = peer.last["losses"]
        lines = []
        for kind, other, smoothing in (
            ("dpo", "sigmoid", 0.0),
            ("hinge", "hinge", 0.0),
            ("robust", "robust", 0.1),
            ("ipo", "ipo", 0.0),
            ("sigmoid_norm", "sigmoid_norm", 0.0),
        ):
            mine = loss_of(kind, smoothing)
            lines.append(
                (
                    f"loss {kind}",
                    f"{mine:.8f}",
                    (
                        f"TRL {theirs[other]:.8f}, relative difference "
                        f"{abs(mine / theirs[other] - 1):.1e}"
                    ),
                )
            )
        ratio = seconds["trl"] / seconds["ours"]
        against(
            "Training",
            "DPO on pairs, reference included",
            "TRL",
            ours=seconds["ours"],
            theirs=seconds["trl"],
        )
        padded = peer.last["tokens"]
        lines.append(
            (
                "DPO, 4 pairs a batch",
                f"{ratio:.2f} ×",
                (
                    f"{seconds['ours']:.1f} s, {data.num_tokens:,} slots; {seconds['trl']:.1f} s, "
                    f"{padded:,}; goal 2.5"
                ),
            )
        )
    return lines


def columns(repeats: int) -> list[Any]:
    """What a float32 column costs the loader: time for its bytes, over the time of the bytes that
    rows have anyway.
    """
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 50_000, int(size)) for size in draw.integers(100, 1500, 12_000)]
    with tempfile.TemporaryDirectory() as folder:
        data = {
            "plain": ps.write_dataset(f"{folder}/a", documents, vocab_size=50_000),
            "column": ps.write_dataset(
                f"{folder}/b",
                documents,
                vocab_size=50_000,
                columns={"x": [draw.random(len(one)) for one in documents]},
            ),
        }

        def rival(dataset: Dataset) -> Callable[[], float]:
            loader = ps.Loader(dataset, sequence_length=4096, rows_per_step=8, threads=0)
            steps = iter(loader)
            next(steps)
            return lambda: cpu_seconds(lambda: [next(steps).arrays() for _ in range(100)])

        seconds = take_turns({name: rival(dataset) for name, dataset in data.items()}, repeats)
        step = next(
            iter(ps.Loader(data["plain"], sequence_length=4096, rows_per_step=8, threads=0))
        ).arrays()
        size = [sum(shard.bytes for shard in data[name].manifest.shards) for name in data]
    moved = sum(value.nbytes for value in step.values() if isinstance(value, np.ndarray)) / 8 / 4096
    extra = seconds["column"] / seconds["plain"] - 1
    return [
        (
            "a float32 column, time of a step",
            f"+ {100 * extra:.0f} %",
            f"{100 * 4 / moved:.0f} % more bytes in rows",
        ),
        (
            "bytes on the disk over 4 a token",
            f"{(size[1] - size[0]) / 4 / data['plain'].num_tokens:.3f}",
            "goal 1.2",
        ),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--oasst", help="trees of OASST, JSON lines")
    parser.add_argument("--tokenizer")
    parser.add_argument("--template")
    parser.add_argument(
        "--round", metavar="FOLDER", help="trajectories; then nothing else is timed"
    )
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    if flags.round:
        table("Trees against paths apart", compare_round(flags.round, flags.repeats))
        return
    rows = columns(flags.repeats)
    for name, (prompt, answer, count, documents, goal) in SHAPES.items():
        rows += compare(
            name, random_groups(prompt, answer, count, documents), count == 2, goal, flags.repeats
        )
    if flags.oasst:
        pairs = oasst_pairs(flags.oasst, flags.tokenizer, flags.template, SLOTS // 2)[:PAIRS]
        rows += compare("OASST, best and worst reply", pairs, True, 1.25, flags.repeats)
    table(f"Trees against the same answers apart, {flags.threads} thread(s)", rows)
    if flags.oasst and flags.peers:
        pairs = oasst_pairs(flags.oasst, flags.tokenizer, flags.template, 1024)
        table(
            "Against TRL",
            against_trl(flags.peers, pairs[:PAIRS], min(flags.repeats, 2), flags.threads),
        )


if __name__ == "__main__":
    main()
