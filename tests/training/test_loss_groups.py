"""What a step's loss is made of: by source, task and distance, against sums by hand, however the
step is cut.
"""

from collections import defaultdict

import pytest
import torch
from training_makers import losses, make, on_two_processes, train

from penstock.learn.training.loss_groups import LossSums
from penstock.learn.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("plain_torch")

MIXED = (
    "data.sources=[{path: DATA/train, name: web}, {path: DATA/validation, name: held/out, "
    "objective: {preset: ul2r, modes: null}}, {path: DATA/validation, name: later, share: 0}]"
)
CHANGE = "data.changes=[{step: 2, shares: {later: 1}}]"
FOUR = "training.steps=4"


def mixed(data):
    return MIXED.replace("DATA", str(data / "data")), CHANGE, FOUR


def parts(record):
    return {name: value for name, value in record.items() if name.startswith("loss.")}


def by_hand(trainer, step):
    """Mean nats of each source and task, position by position, with the places that `explain`
    tells.
    """
    sums = defaultdict(lambda: [0.0, 0.0])
    with torch.no_grad():
        for number, row in enumerate(step):
            tensors = trainer.model.tensors(row)
            logits = trainer.model.logits(trainer.model(tensors))[0].double()
            nats = -torch.log_softmax(logits, -1)
            for piece in trainer.loader.explain(step.index, number):
                task = piece.task or "causal"
                for slot in range(piece.begin, piece.begin + piece.num_tokens):
                    target, weight = (
                        int(tensors.targets[0, slot]),
                        float(tensors.loss_weights[0, slot]),
                    )
                    if target != -100:
                        for name in (f"loss.source.{piece.source}", f"loss.task.{task}"):
                            sums[name][0] += weight * float(nats[slot, target])
                            sums[name][1] += weight
    return {name: nats / weight for name, (nats, weight) in sums.items() if weight}


@pytest.fixture(scope="module")
def records(data, tmp_path_factory):
    return train(data, tmp_path_factory.mktemp("groups") / "run", *mixed(data))


def test_sources_and_tasks_by_hand(data, tmp_path):
    trainer = make(data, tmp_path / "run", *mixed(data))
    seen = set()
    twin = make(data, tmp_path / "twin", *mixed(data))
    for step, record in zip(twin.loader, trainer.train(), strict=False):
        expected = by_hand(twin, step)
        assert parts(record) == pytest.approx(expected, rel=1e-5)
        seen |= expected.keys()
        for mine, theirs in zip(twin.model.parameters(), trainer.model.parameters(), strict=True):
            mine.data.copy_(theirs)
    sources = {"loss.source.web", "loss.source.held/out", "loss.source.later"}
    assert seen == sources | {"loss.task.causal", "loss.task.R", "loss.task.X", "loss.task.S"}


def test_a_source_without_targets_in_a_step_has_no_figure(records):
    assert ["loss.source.later" in record for record in records] == [False, False, True, True]


def test_the_loss_is_that_of_before_bit_for_bit(data, tmp_path, records, monkeypatch):
    monkeypatch.setattr(LossSums, "groups", lambda self, row: None)
    monkeypatch.setattr(LossSums, "add", lambda self, found: None)
    plain = train(data, tmp_path / "run", *mixed(data))
    assert not any(parts(record) for record in plain)
    assert losses(plain) == losses(records)


@pytest.mark.parametrize("how", ["training.micro_sequences=4", "data.loader.window_rows=1024"])
def test_rows_in_parts_have_the_same_parts(data, tmp_path, how):
    """Causal sources alone, as prefixes cannot be cut."""
    two = MIXED.replace("DATA", str(data / "data")).replace("{preset: ul2r, modes: null}", "causal")
    whole, cut = (
        train(data, tmp_path / str(n), two, FOUR, *more) for n, more in enumerate([(), (how,)])
    )
    for one, other in zip(whole, cut, strict=True):
        assert parts(other) == pytest.approx(parts(one), rel=1e-5)
        assert set(parts(one)) == {"loss.source.web", "loss.source.held/out"}


def test_documents_that_see_each_other_are_still_told_apart(data, tmp_path):
    two = MIXED.replace("DATA", str(data / "data")).replace("{preset: ul2r, modes: null}", "causal")
    trainer, twin = (
        make(data, tmp_path / name, two, FOUR, "data.attention=row") for name in ("run", "twin")
    )
    expected = by_hand(twin, next(iter(twin.loader)))
    expected.pop("loss.task.causal")
    assert parts(next(trainer.train())) == pytest.approx(expected, rel=1e-5)


def test_distances_by_hand(data, tmp_path):
    options = (FOUR, "model.prediction_heads=3", "model.prediction_weights=[1, 0.5, 0]")
    trainer, twin = (make(data, tmp_path / name, *options) for name in ("run", "twin"))
    record, step = next(trainer.train()), next(iter(twin.loader))
    for distance in (2, 3):
        nats, counts = 0.0, 0
        for row in step:
            tensors = twin.model.tensors(row)
            with torch.no_grad():
                logits = twin.model.logits(twin.model(tensors)[distance - 1])
            targets = tensors.targets[distance - 1]
            nats += float(
                torch.nn.functional.cross_entropy(
                    logits, targets, reduction="sum", ignore_index=-100
                )
            )
            counts += int((targets != -100).sum())
        assert record[f"loss.distance.{distance}"] == pytest.approx(nats / counts, rel=1e-5)
    assert set(parts(record)) == {"loss.distance.2", "loss.distance.3"}


def test_one_of_each_has_no_parts(data, tmp_path):
    assert parts(next(make(data, tmp_path / "run").train())) == {}


def test_a_teacher_keeps_its_rows(data, tmp_path):
    """The companion of the teachers stands behind that of the groups."""
    train(data, tmp_path / "big", "training.steps=2", "training.schedule.warmup_steps=1")
    teach = f"teacher={{teachers: [{{model: {tmp_path / 'big'}, loss: {{kind: kl}}}}]}}"
    two = MIXED.replace("DATA", str(data / "data")).replace("{preset: ul2r, modes: null}", "causal")
    trainer, plain = (
        make(data, tmp_path / str(n), two, FOUR, *more) for n, more in enumerate([(teach,), ()])
    )
    taught = next(trainer.train())
    assert taught["chunks"] > 0
    assert parts(taught) == pytest.approx(parts(next(plain.train())), rel=1e-5)


def test_a_slash_in_the_name_of_a_source_is_no_evaluation(data, tmp_path):
    from penstock.learn.training.metrics import Metrics

    run = tmp_path / "run"
    trainer = make(data, run, *mixed(data))
    with Metrics(run, total_steps=4, every=2) as metrics:
        for record in trainer.train():
            metrics.see(record)
    assert [record["step"] for record in read_metrics(run)] == [2, 4]


@pytest.mark.slow
def test_two_ranks_have_the_parts_of_one(data, tmp_path, records):
    code = """
        import os, sys
        from pathlib import Path
        import torch
        from penstock.learn.training.distributed import Ranks
        from training_makers import train

        with Ranks(torch.device("cpu")) as ranks:
            train(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:], ranks=ranks)
            ranks.barrier()
        os._exit(0)
    """
    on_two_processes(tmp_path / "script.py", code, data, tmp_path / "run", *mixed(data))
    for one, two in zip(records, read_metrics(tmp_path / "run"), strict=True):
        assert parts(two) == pytest.approx(parts(one), rel=1e-4)
