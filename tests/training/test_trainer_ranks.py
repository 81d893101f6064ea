"""Two processes by gloo, copied and sharded (FSDP2): the losses of one; checkpoints of one on two
and of two on one.
"""

import json

import numpy as np
import pytest
import torch
from training_makers import on_two_processes, train, values

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_torch")]

SCRIPT = """
    import json, os, sys
    from pathlib import Path
    import torch
    from penstock.core.errors import PenstockError
    from penstock.learn.training.distributed import Ranks
    from training_makers import make, train

    data, folder = Path(sys.argv[1]), Path(sys.argv[2])
    look = f"training.evaluators={{held: {{data: {data}/data/validation, every: 3}}}}"
    shard = "training.shard=true"
    with Ranks(torch.device("cpu")) as ranks:
        def run(name, *assignments, **options):
            train(data, folder / name, look, "training.steps=6", *assignments, ranks=ranks, **options)
            ranks.barrier()
        run("copied")
        run("sharded", shard)
        run("sharded then copied", shard, until=4)
        run("sharded then copied", resume=True)
        run("copied then sharded", until=4)
        run("copied then sharded", shard, "training.checkpoints.asynchronous=true", resume=True)
        run("sharded then one", shard, until=4)
        run("copied then one", until=4)
        run("one then sharded", shard, resume=True)
        run("one then copied", resume=True)
        run("three heads", shard, "model.prediction_heads=3")
        texts = "training.evaluators={texts: {kind: samples, prompts: [a b, c], max_tokens: 6, every: 3}}"
        lora = ("training.lora={rank: 2, train_embeddings: all}", texts)
        run("lora copied", *lora)
        run("lora sharded", shard, *lora, until=4)
        run("lora sharded", shard, *lora, resume=True)
        run("muon copied", "training.optimizer.kind=muon")
        run("muon sharded", shard, "training.optimizer.kind=muon", until=4)
        run("muon sharded", shard, "training.optimizer.kind=muon", resume=True)
        run("blocks copied", *sys.argv[3:])
        run("blocks sharded", shard, *sys.argv[3:])
        refused = []
        for name, assignment in (("uneven", "data.loader.rows_per_step=5"), ("copied", "training.seed=0")):
            try:
                make(data, folder / name, assignment, ranks=ranks)
            except PenstockError as error:
                refused.append(f"{type(error).__name__}: {error}")
        try:
            # As where each machine has a folder of its own.
            own = folder / ("copied" if ranks.is_first else "elsewhere")
            make(data, own, "training.steps=6", resume=True, ranks=ranks)
        except PenstockError as error:
            refused.append(f"{type(error).__name__}: {error}")
    print(json.dumps(refused), flush=True)
    # Gloo's threads may still hold tensors, and abort an interpreter that ends (pytorch/pytorch#179291).
    os._exit(0)
"""  # noqa: E501
STEPS = "training.steps=6"
BLOCKS = (
    "model.layers=3",
    (
        "model.blocks={full: {qk_norm: true}, delta: {mixer: gated_delta}, sparse: {experts: "
        "3, balance: 0.3}, either: {mixer: stochastic, choices: [full, delta], main: full, "
        "experts: 4, balance: 0.3}}"
    ),
    "model.pattern=[either, sparse]",
)
"""Experts and drawn mixers; at balance 0.3 their loss changes gradients visibly."""


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """The folder of all runs, and what each rank was refused."""
    folder = tmp_path_factory.mktemp("ranks")
    look = f"training.evaluators={{held: {{data: {data}/data/validation, every: 3}}}}"
    train(data, folder / "one", look, STEPS)
    train(data, folder / "heads of one", look, STEPS, "model.prediction_heads=3")
    train(data, folder / "blocks of one", look, STEPS, *BLOCKS)
    for name in ("one then sharded", "one then copied"):
        train(data, folder / name, look, STEPS, until=4)
    ended = on_two_processes(folder / "script.py", SCRIPT, data, folder, *BLOCKS)
    for name in ("sharded then one", "copied then one"):
        train(data, folder / name, look, STEPS, resume=True)
    return folder, [json.loads(out.splitlines()[-1]) for out, _ in ended]


def records(runs, name: str):
    from penstock.learn.training.metrics import read_metrics

    return read_metrics(runs[0] / name)


@pytest.mark.parametrize(
    "name",
    [
        "copied",
        "sharded",
        "sharded then copied",
        "copied then sharded",
        "sharded then one",
        "copied then one",
        "one then sharded",
        "one then copied",
    ],
)
def test_it_trains_what_one_process_does(runs, name):
    due, found = records(runs, "one"), records(runs, name)
    assert values(found, "step") == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(values(found), values(due), rtol=1e-6)
    np.testing.assert_allclose(
        values(found, "gradient_norm"), values(due, "gradient_norm"), rtol=1e-4
    )
    assert values(found, "tokens") == values(due, "tokens")
    for step in (2, 5):
        assert found[step]["held/loss"] == pytest.approx(due[step]["held/loss"], rel=1e-6)
        assert found[step]["held/bits_per_byte"] == pytest.approx(
            due[step]["held/bits_per_byte"], rel=1e-6
        )
        assert found[step]["held/targets"] == due[step]["held/targets"]


def test_a_sharded_run_is_used_like_any_other(runs, tmp_path):
    """Its weights lie in a file of each rank: loaded, exported, evaluated, begun from."""
    import penstock as ps

    model, whole = (ps.load_model(runs[0] / name) for name in ("sharded", "copied"))
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=1e-5)
    run = ps.open_run(runs[0] / "sharded")
    assert len(list((run.model / "weights.shards").iterdir())) == 2
    assert run.fingerprint() != ps.open_run(runs[0] / "copied").fingerprint()
    run.export(tmp_path / "out")
    exported = ps.load_model(tmp_path / "out").state_dict()
    assert all(torch.equal(one, exported[name]) for name, one in model.state_dict().items())
    assert run.sample("the", max_tokens=3)


def test_several_target_distances(runs):
    np.testing.assert_allclose(
        values(records(runs, "three heads")), values(records(runs, "heads of one")), rtol=1e-6
    )


@pytest.mark.parametrize("name", ["blocks copied", "blocks sharded"])
def test_experts_and_drawn_mixers(runs, name):
    due, found = records(runs, "blocks of one"), records(runs, name)
    for figure in ("loss", "gradient_norm", "experts.evenness"):
        np.testing.assert_allclose(values(found, figure), values(due, figure), rtol=1e-4)


def test_lora_and_texts(runs):
    due, found = records(runs, "lora copied"), records(runs, "lora sharded")
    for figure in ("loss", "gradient_norm"):
        np.testing.assert_allclose(values(found, figure), values(due, figure), rtol=1e-4)
    for step in (2, 5):
        for text in ("texts/0", "texts/1"):
            assert found[step][text] == due[step][text]
    # The base is written once, next to the checkpoints.
    newest = runs[0] / "lora sharded" / "checkpoints" / "step-00000006" / "model"
    assert not (newest / "model.safetensors").exists()


def test_muon(runs):
    due, found = records(runs, "muon copied"), records(runs, "muon sharded")
    # Rounding of gradients shows, as the updates are computed in bfloat16.
    np.testing.assert_allclose(values(found), values(due), rtol=1e-3)


def test_refusals_are_those_of_all_ranks(runs):
    """Nobody waits for a process that gave up."""
    first, second = runs[1]
    assert "rows_per_step" in first[0]
    assert "rows_per_step" in second[0]
    assert first[1].startswith("OutputError: ")
    assert "a run is there already" in first[1]
    assert second[1].startswith("DistributedError: rank 0 failed: ")
    assert "the ranks find different checkpoints, this one step 6" in first[2]
    assert "the ranks find different checkpoints, this one step 0" in second[2]
