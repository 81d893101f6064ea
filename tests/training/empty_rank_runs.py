"""Runs in which one rank, the other or neither has a target in a step, with every loss; on any
number of ranks.

Run as a program by test_empty_ranks.py: the folder of the data, that of the runs, and the names of
cases.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as ps
from makers.texts import make_texts
from makers.tokenizers import tiny_tokenizer
from penstock.data.shards import build_tree
from penstock.data.shards.memory import weight_spans
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.metrics import read_metrics
from penstock.learn.training.path_settings import LABEL_KINDS, PAIR_KINDS
from penstock.learn.training.run_folder import RunFolder
from penstock.models.saving import stored_weights
from penstock.models.settings import BlockSettings
from penstock.plan.objectives import SpanCorruption

LENGTH, ROWS = 32, 4
STEPS = ("TTUU", "UUTT", "UUUU", "UTTU", "UUUT", "TTTT")
"""Which rows of each step have targets (T); the first two are rank 0's of two."""
SENTINELS = [f"<extra_id_{n}>" for n in range(12)]

Settings = dict[str, Any]


# -- losses of the user's own
# ------------------------------------------------------------------------------------------


def mean_nats(model: Any, row: Any, denominators: Any) -> Any:
    """As anybody would write it: nothing reaches the head without a target."""
    hidden = model(row)[0]
    there = row.targets[0] >= 0
    nats = torch.nn.functional.cross_entropy(
        model.logits(hidden[there]), row.targets[0][there], reduction="sum"
    )
    return nats / denominators[0]


def zero_without_targets(model: Any, row: Any, denominators: Any) -> Any:
    """The model runs, and its output is not used where there is no target."""
    hidden = model(row)[0]
    if not bool((row.targets[0] >= 0).any()):
        return torch.zeros(())
    return model.logits(hidden).logsumexp(-1).sum() / denominators[0]


def early_return(model: Any, row: Any, denominators: Any) -> Any:
    """The model does not even run without a target."""
    if not bool((row.targets[0] >= 0).any()):
        return torch.zeros(()), {"nats": 0.0}
    share = mean_nats(model, row, denominators)
    return share, {"nats": share}


def without_a_head(model: Any, row: Any, denominators: Any) -> Any:
    """The head has a gradient on no rank."""
    hidden = model(row)[0]
    return hidden[row.targets[0] >= 0].square().sum() / max(denominators[0], 1.0)


# -- cases
# --------------------------------------------------------------------------------------------------

OWN = "empty_rank_runs:"
EXPERTS = {"blocks": {"sparse": BlockSettings(experts=3, balance=0.3)}, "pattern": ("sparse",)}
ONE_ROW: Settings = {"rows_per_pass": 1}
CASES: dict[str, Settings] = {
    "tied": ONE_ROW,
    "untied": {**ONE_ROW, "model": {"tied": False}},
    "joined rows": {"rows_per_pass": 2, "model": {"tied": False}},
    "z-loss": {**ONE_ROW, "z_loss": 0.01, "model": {"tied": False}},
    "three distances": {**ONE_ROW, "model": {"tied": False, "prediction_heads": 3}},
    "experts": {**ONE_ROW, "model": {"tied": False, **EXPERTS}},
    "frozen embedding": {**ONE_ROW, "frozen": ("embedding*",), "model": {"tied": False}},
    "frozen head": {**ONE_ROW, "frozen": ("unembedding*",), "model": {"tied": False}},
    "only the head": {
        **ONE_ROW,
        "frozen": ("embedding*", "blocks*", "norm*"),
        "model": {"tied": False},
    },
    "denoising": {**ONE_ROW, "data": "denoised", "model": {"tied": False}},
    "parts of rows": {"micro_sequences": 2, "model": {"tied": False}, "only": "copied"},
    "lora": {"lora": {"rank": 2}, "model": {"tied": False}},
    "context parallel": {"context_parallel": 2, "model": {"tied": False}, "only": "copied"},
    **{
        f"own: {name}": {"loss": f"{OWN}{name}", "model": {"tied": False}}
        for name in ("mean_nats", "zero_without_targets", "early_return", "without_a_head")
    },
    **{
        f"preference: {kind}": {
            "preference": {"kind": kind, "beta": 0.5, "sft_weight": 0.5 if kind == "orpo" else 0.0},
            "data": "some answers" if kind == "kto" else "answers",
            "model": {"tied": False},
        }
        for kind in (*PAIR_KINDS, *LABEL_KINDS)
    },
    **{
        f"policy: {name}": {"policy": policy, "data": "answers", "model": {"tied": False}}
        for name, policy in {
            "clip": {},
            "tokens": {"normalise": "token", "kl": 0.1},
            "constant": {"normalise": "constant", "length": 8, "scale": "none"},
            "cispo": {"kind": "cispo", "clip_high": 4.0},
            "sequence": {"importance": "sequence", "dead_groups": "leave_out"},
        }.items()
    },
    **{
        f"teacher: {name}": {"teacher": taught, "model": {"tied": False}, **more}
        for name, taught, more in (
            ("kl", {"model": "same", "loss": {"kind": "kl"}}, {}),
            (
                "kl alone",
                {"model": "same", "loss": {"kind": "kl", "top_k": 5}},
                {"cross_entropy": 0.0},
            ),
            ("p_kl", {"model": "other", "loss": {"kind": "p_kl"}}, {}),
            ("h_kl", {"model": "other", "loss": {"kind": "h_kl"}}, {}),
            (
                "alm",
                {"model": "other", "loss": {"kind": "alm"}},
                {"cross_entropy": 0.0, "balance": "fixed"},
            ),
            ("uld", {"model": "other", "loss": {"kind": "uld"}}, {"cross_entropy": 0.0}),
            (
                "learnt projection",
                {"model": "other", "loss": {"kind": "p_kl"}, "learn_projection": True},
                {"only": "copied"},
            ),
        )
    },
}
"""Arguments of `ps.train` or `ps.distill`; `only`: what it does not go with. All begin with an
untied head if they can: there a missing gradient shows.
"""


def make_data(folder: Path) -> None:
    """Documents and answers in the pattern of `STEPS`, one a row; and teachers."""
    from training_makers import make_teacher, train, write_run_file

    tokenizer = tiny_tokenizer(folder / "tokenizer", make_texts(200), 340, ["[NLU]", *SENTINELS])
    made = [tokenizer.encode(text).tolist()[:20] for text in make_texts(len(STEPS) * ROWS)]
    trained = [letter == "T" for step in STEPS for letter in step]
    spans = [
        [(0, len(ids), 1.0)] if there else [] for ids, there in zip(made, trained, strict=True)
    ]
    ps.write_dataset(folder / "documents", made, spans=spans, tokenizer=tokenizer)
    generator = np.random.default_rng(3)
    trees = []
    for number, there in enumerate(trained):
        prompt = made[number][:4]
        answers = [
            [*prompt, 20 + one, *generator.integers(20, 90, 3 + one).tolist()] for one in range(2)
        ]
        weights = [
            [0.0] * len(prompt) + [float(there)] * (len(answer) - len(prompt)) for answer in answers
        ]
        values = {
            "rank": [0.0, 1.0],
            "label": [1.0, -1.0],
            "reward": [float(generator.random()), 0.2],
        }
        trees.append(build_tree(answers, weights, values=values))
    for name, some in (("answers", trees), ("some answers", trees[:8] + trees[12:])):
        ps.write_dataset(
            folder / name,
            [one.tokens for one in some],
            trees=[one.tree for one in some],
            tokenizer=tokenizer,
            spans=[weight_spans(one.loss_weights) for one in some],
        )
    (folder / "data").mkdir()
    (folder / "data" / "train").symlink_to(folder / "documents")
    train(
        write_run_file(folder), folder / "same", "training.steps=4", "data.loader.packing=best_fit"
    )
    make_teacher(folder / "another", 4)


def run_case(
    name: str,
    data: Path,
    output: Path,
    *,
    rank: int = 0,
    size: int = 1,
    shard: bool = False,
    **more: Any,
) -> Any:
    """Train a case; the records of all steps, and the weights at its end."""
    settings = {**CASES[name]}
    settings.pop("only", None)
    kind = settings.pop("data", "documents")
    objective = (
        ps.Denoise([SpanCorruption(0.3, 3.0)], sentinels=SENTINELS)
        if kind == "denoised"
        else ps.Causal()
    )
    source = ps.Source(
        data / ("documents" if kind == "denoised" else kind),
        objective=objective,
        shuffle="none",
        max_epochs=1,
    )
    share = settings.get("context_parallel", 1) if size > 1 else 1
    if size == 1:
        settings.pop("context_parallel", None)
    sizes = settings.pop("model", {})
    heads = sizes.get("prediction_heads")
    loader = ps.Loader(
        source, sequence_length=LENGTH, rows_per_step=ROWS, packing="none",
        data_parallel=(rank // share, size // share),
        requirements=ps.InputRequirements(target_distances=heads) if heads else None,
    )  # fmt: skip
    vocab_size = loader.datasets[0].tokenizer.vocab_size
    model = ps.build_model(
        **{"layers": 2, "width": 16, "heads": 2, "vocab_size": vocab_size, **sizes}
    )
    taught = settings.pop("teacher", None)
    settings = {
        "learning_rate": 3e-3,
        "threads": 1,
        "progress": False,
        "shard": shard,
        **settings,
        **more,
    }
    if taught is None:
        ps.train(model, loader, output=output, **settings)
    else:
        places = {"same": data / "same", "other": data / "another" / "run"}
        ps.distill(
            model,
            loader,
            teacher={**taught, "model": str(places[taught["model"]])},
            output=output,
            **settings,
        )
    return read_metrics(output)


def weights_of(output: Path) -> dict[str, Any]:
    """The weights at the end of a run."""
    from safetensors.torch import load_file

    model = RunFolder.open(output).model
    if (stored := stored_weights(model)) is not None:
        return stored.read()
    files = sorted(model.rglob("*.safetensors"))
    return {name: weight for file in files for name, weight in load_file(file).items()}


def main() -> None:
    """Train the named cases on all ranks, copied and sharded."""
    data, folder, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with Ranks(torch.device("cpu")):
        for name in names:
            for shard in (False, True):
                if not shard or CASES[name].get("only") != "copied":
                    output = folder / f"{name} {'sharded' if shard else 'copied'}".replace(":", "")
                    run_case(name, data, output, rank=rank, size=size, shard=shard)
    print(json.dumps(names), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
