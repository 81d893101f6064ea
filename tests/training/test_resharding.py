"""Runs that go on with other ranks: from four to two and to one, sharded or not, with each
optimizer, written beside the training.
"""

import shutil

import numpy as np
import pytest
import torch
from training_makers import train, values

import penstock as ps
from makers.models import tiny_huggingface
from makers.ranks import run_processes
from penstock.learn.training.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_torch")]

SCRIPT = """
    import os, sys
    from pathlib import Path
    import torch
    from penstock.learn.training.distributed import Ranks
    from training_makers import train

    data, folder, until = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    with Ranks(torch.device("cpu")) as ranks:
        for name, *options in eval(sys.argv[4]):
            more = {"until": until} if until else {"resume": True}
            train(data, folder / name, "training.steps=6", *options, ranks=ranks, **more)
            ranks.barrier()
    os._exit(0)
"""
OPTIMIZERS = {
    "adamw": ["training.optimizer.fused=true"],
    "not fused": ["training.optimizer.fused=false"],
    "muon": ["training.optimizer.kind=muon"],
}
SHARD = ["training.shard=true", "training.checkpoints.asynchronous=true"]
THEIRS = "llama"
# The end of a run, by how it begins.
PLANS = {
    f"{before} {after} {kind}": (before, after, kind)
    for before in ("sharded", "copied")
    for after in ("sharded", "copied", "one")
    for kind in ([*OPTIMIZERS, THEIRS] if before == "sharded" else ["adamw"])
}


def options(way, kind):
    of_kind = ["model=hf:BASE"] if kind == THEIRS else OPTIMIZERS[kind]
    return [*(SHARD if way == "sharded" else []), *of_kind]


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resharding")
    vocabulary = ps.open_dataset(data / "data" / "train").tokenizer.vocab_size
    inner = tiny_huggingface(vocab_size=vocabulary, tie_word_embeddings=True)
    inner.save_pretrained(folder / "base")

    def here(kind, *begun):
        return [one.replace("BASE", f"{folder}/base") for one in options(*begun, kind)]

    four = [(name, *here(kind, before)) for name, (before, _, kind) in PLANS.items()]
    two = [(name, *here(kind, after)) for name, (_, after, kind) in PLANS.items() if after != "one"]
    run_processes(folder / "four.py", SCRIPT, data, folder, 5, repr(four), processes=4)
    run_processes(folder / "two.py", SCRIPT, data, folder, 0, repr(two), processes=2)
    shutil.copytree(folder / f"sharded one {THEIRS}", folder / "of four")
    for kind in (*OPTIMIZERS, THEIRS):
        train(data, folder / kind, "training.steps=6", *here(kind, "one"))
    for name, (_, after, kind) in PLANS.items():
        if after == "one":
            train(data, folder / name, "training.steps=6", *here(kind, "one"), resume=True)
    return folder


@pytest.mark.parametrize("name", PLANS)
def test_losses_are_those_of_one_process(runs, name):
    kind = PLANS[name][2]
    due, found = read_metrics(runs / kind), read_metrics(runs / name)
    assert values(found, "step") == [1, 2, 3, 4, 5, 6]
    # Muon's matrix products are in bfloat16, and are cut otherwise on other ranks.
    tolerance = 5e-3 if kind == "muon" else 2e-6
    np.testing.assert_allclose(values(found), values(due), rtol=tolerance)


def test_a_sharded_model_of_transformers_is_used_like_any_other(runs, tmp_path):
    """Its weights have the names of its module, not those on the disk of transformers."""
    run = ps.open_run(runs / "of four")
    assert len(list((run.model / "weights.shards").iterdir())) == 4
    model = ps.load_model(run.path)
    run.export(tmp_path / "out")
    exported = ps.load_model(tmp_path / "out").state_dict()
    own = model.state_dict()
    # Exported, it is a plain Llama, with our names.
    table = next(one for name, one in exported.items() if "embed" in name)
    assert torch.equal(table, own["inner.model.embed_tokens.weight"])
    assert (
        own["inner.lm_head.weight"].data_ptr() == own["inner.model.embed_tokens.weight"].data_ptr()
    )
    assert run.sample("the", max_tokens=3)
