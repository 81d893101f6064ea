"""The trainer with ranks that share rows: losses and gradients of one process, whatever else the
run has.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from test_loss_groups import mixed
from training_makers import make, train, values

import penstock as ps
from makers.forked import run_python
from makers.ranks import run_processes, run_ranks
from penstock.core.errors import ConfigError
from penstock.learn.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("plain_torch")

SCRIPT = """
    import json, os, sys
    from pathlib import Path
    import torch
    import penstock as ps
    from penstock.core.errors import PenstockError
    from penstock.learn.training.distributed import Ranks
    from training_makers import make, train
    from test_loss_groups import mixed

    data, folder = Path(sys.argv[1]), Path(sys.argv[2])
    look = f"training.evaluators={{held: {{data: {data}/data/validation, every: 3}}}}"
    seen = []
    for shared, name in ((4, "four"), (2, "two")):
        with Ranks(torch.device("cpu"), shared) as ranks:
            def run(kind, *assignments, **options):
                how = (f"training.context_parallel={shared}", *assignments)
                train(data, folder / f"{kind} {name}", *how, ranks=ranks, **options)
                ranks.barrier()
            seen.append([
                ranks.data.rank, ranks.data.size, ranks.context.rank, ranks.context.size,
                ranks.sum_of_rows([ranks.data.rank + 1.0])[0],
            ])
            run("plain", look, "training.steps=4")
            run("mixed", *mixed(data))
            run("windows", "training.steps=4", "model.sliding_window=9", "model.prediction_heads=2")
            run("sharded", "training.steps=4", "training.shard=true")
            run("resumed", look, "training.steps=4", until=2)
            run("resumed", look, "training.steps=4", resume=True)
            run("from one", look, "training.steps=4", resume=True)
            refused = []
            try:
                make(data, folder / "experts", "training.context_parallel=2", "model.pattern=[sparse]",
                     "model.blocks={sparse: {experts: 3}}", ranks=ranks)
            except PenstockError as error:
                refused.append(str(error))
    model = ps.build_model(vocab_size=340, layers=1, width=16, heads=2)
    loader = ps.Loader(
        f"{data}/data/train", sequence_length=64, rows_per_step=4, data_parallel=ps.DataParallel.from_env()
    )
    try:
        ps.train(model, loader, output=folder / "place", steps=1, context_parallel=2, device="cpu")
    except PenstockError as error:
        refused.append(str(error))
    print(json.dumps([seen, refused]), flush=True)
    # Gloo's threads may still hold tensors, and abort an interpreter that ends (pytorch/pytorch#179291).
    os._exit(0)
"""  # noqa: E501
FOUR = "training.steps=4"
KINDS = {
    "plain": (FOUR,),
    "windows": (FOUR, "model.sliding_window=9", "model.prediction_heads=2"),
    "sharded": (FOUR,),
    "resumed": (FOUR,),
    "from one": (FOUR,),
}


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """The folder of all runs, and what each rank was."""
    folder = tmp_path_factory.mktemp("context")
    look = f"training.evaluators={{held: {{data: {data}/data/validation, every: 3}}}}"
    for name in ("four", "two"):
        train(data, folder / f"from one {name}", look, FOUR, until=2)
    ended = run_processes(folder / "script.py", SCRIPT, data, folder, processes=4)
    return folder, [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["four", "two"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_what_one_process_does(data, runs, tmp_path, kind, shared):
    due, found = (
        train(data, tmp_path / "run", *KINDS[kind]),
        read_metrics(runs[0] / f"{kind} {shared}"),
    )
    assert values(found, "step") == [1, 2, 3, 4]
    for name, off in (("loss", 1e-6), ("gradient_norm", 1e-4), ("tokens", 0), ("targets", 0)):
        np.testing.assert_allclose(values(found, name), values(due, name), rtol=off)


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["four", "two"])
def test_parts_of_the_loss_by_source_and_task(data, runs, tmp_path, shared):
    """A mixture with prefixes, whose slots carry numbers that are cut with the rows."""
    due, found = (
        train(data, tmp_path / "run", *mixed(data)),
        read_metrics(runs[0] / f"mixed {shared}"),
    )
    for one, other in zip(found, due, strict=True):
        mine, theirs = (
            {k: v for k, v in record.items() if k.startswith("loss")} for record in (one, other)
        )
        assert mine == pytest.approx(theirs, rel=1e-5)
        assert len(mine) > 4


@pytest.mark.slow
def test_ranks_have_their_places(runs):
    for rank, (seen, _) in enumerate(runs[1]):
        assert seen == [[0, 1, rank, 4, 1.0], [rank // 2, 2, rank % 2, 2, 3.0]]


@pytest.mark.slow
def test_what_is_refused_on_all_ranks(runs):
    for rank, (_, refused) in enumerate(runs[1]):
        assert "the balance loss of experts needs whole documents" in refused[0]
        assert (
            f"as 2 processes share each row; pass data_parallel=({rank // 2}, 2) to ps.Loader"
            in refused[1]
        )


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["training.micro_sequences=2"], "context_parallel and micro_sequences do not go together"),
        (["training.preference={}"], "context_parallel and preference do not go together"),
        (["training.compile=true"], "context_parallel and compile do not go together"),
        (["training.attention=flex"], "context_parallel and attention: flex do not go together"),
        (
            ["training.loss=somewhere:loss"],
            "training.loss is your own, and context_parallel belongs to the built-in",
        ),
    ],
)
def test_what_needs_whole_rows_is_refused(data, tmp_path, assignments, message):
    with pytest.raises(ConfigError, match=message):
        make(data, tmp_path / "run", "training.context_parallel=2", *assignments)


def test_processes_must_divide(data, tmp_path):
    model = ps.build_model(vocab_size=340, layers=1, width=16, heads=2)
    loader = ps.Loader(data / "data" / "train", sequence_length=64, rows_per_step=4)
    with pytest.raises(ConfigError, match=r"context_parallel.*3.*processes, 1"):
        ps.train(model, loader, output=tmp_path / "run", steps=1, context_parallel=3)
    with pytest.raises(ConfigError, match="context_parallel must be above 0, got 0"):
        ps.train(model, loader, output=tmp_path / "run", steps=1, context_parallel=0)


@pytest.mark.slow
def test_the_example_trains_what_one_process_does(data, tmp_path):
    example, dataset = (
        Path(__file__).parents[2] / "examples" / "context_parallel.py",
        data / "data" / "train",
    )
    alone = run_python(example, dataset, "--steps", 4, check=True)
    words = [dataset, "--share", 2, "--steps", 4]
    ended = run_ranks(example, words, 4, tmp_path, TORCHELASTIC_RUN_ID="one")
    assert [status for status, _, _ in ended] == [0] * 4, ended
    assert alone.stdout.count("\n") == 4
    assert [out for _, out, _ in ended] == [alone.stdout, "", "", ""]
