"""Runs that go on with other ranks: from four to two and to one, sharded or not, with each
optimizer, written beside the training.
"""

import numpy as np
import pytest
from training_makers import train, values

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
# The end of a run, by how it begins.
PLANS = {
    f"{before} {after} {kind}": (before, after, kind)
    for before in ("sharded", "copied")
    for after in ("sharded", "copied", "one")
    for kind in (OPTIMIZERS if before == "sharded" else ["adamw"])
}


def options(way, kind):
    return [*(SHARD if way == "sharded" else []), *OPTIMIZERS[kind]]


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resharding")
    four = [(name, *options(before, kind)) for name, (before, _, kind) in PLANS.items()]
    two = [
        (name, *options(after, kind)) for name, (_, after, kind) in PLANS.items() if after != "one"
    ]
    run_processes(folder / "four.py", SCRIPT, data, folder, 5, repr(four), processes=4)
    run_processes(folder / "two.py", SCRIPT, data, folder, 0, repr(two), processes=2)
    for kind in OPTIMIZERS:
        train(data, folder / kind, "training.steps=6", *options("one", kind))
    for name, (_, after, kind) in PLANS.items():
        if after == "one":
            train(data, folder / name, "training.steps=6", *options("one", kind), resume=True)
    return folder


@pytest.mark.parametrize("name", PLANS)
def test_losses_are_those_of_one_process(runs, name):
    kind = PLANS[name][2]
    due, found = read_metrics(runs / kind), read_metrics(runs / name)
    assert values(found, "step") == [1, 2, 3, 4, 5, 6]
    # Muon's matrix products are in bfloat16, and are cut otherwise on other ranks.
    tolerance = 5e-3 if kind == "muon" else 2e-6
    np.testing.assert_allclose(values(found), values(due), rtol=tolerance)
