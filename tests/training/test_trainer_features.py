"""What a run can train: rows in parts, several target distances, LoRA, denoising, models of
transformers; and what it asks of the process.
"""

import gc
import math
import os

import numpy as np
import pytest
import torch
from training_makers import LENGTH, SENTINELS, losses, make, train, values

from penstock.learn.training import RunFolder
from penstock.learn.training.distributed import local_device
from penstock.learn.training.losses import row_loss
from penstock.models.saving import load_model

pytestmark = pytest.mark.usefixtures("plain_torch")
FOUR = "training.steps=4"


def test_rows_in_parts_train_the_same(data, tmp_path):
    due = train(data, tmp_path / "whole", FOUR)
    found = train(data, tmp_path / "parts", FOUR, "training.micro_sequences=4")
    assert values(found) == pytest.approx(values(due), rel=1e-5)
    assert values(found, "gradient_norm") == pytest.approx(values(due, "gradient_norm"), rel=1e-4)


def test_each_target_distance_has_its_own_denominator(data, tmp_path):
    """Steps by hand, each distance a mean over its own targets, against the trainer's."""
    options = (FOUR, "model.prediction_heads=3", "model.prediction_weights=[1, 0.5, 0.25]")
    trainer = make(data, tmp_path / "run", *options)
    twin = make(data, tmp_path / "twin", *options)
    record = next(trainer.train())
    step = next(iter(twin.loader))
    total = torch.zeros(())
    for distance, weight in enumerate([1, 0.5, 0.25]):
        nats, counts = torch.zeros(()), 0
        for row in step:
            tensors = twin.model.tensors(row)
            logits = twin.model.logits(twin.model(tensors)[distance])
            targets = tensors.targets[distance]
            nats = nats + torch.nn.functional.cross_entropy(
                logits, targets, reduction="sum", ignore_index=-100
            )
            counts += int((targets != -100).sum())
        total = total + weight * nats / counts
        if distance == 0:
            assert record["loss"] == pytest.approx(nats.item() / counts, rel=1e-6)
            assert record["targets"] == counts
    total.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in twin.model.parameters()))
    assert record["gradient_norm"] == pytest.approx(norm, rel=1e-5)


def test_z_loss_moves_gradients_and_not_the_loss_that_is_told(data, tmp_path):
    plain, moved = (
        next(make(data, tmp_path / str(z), FOUR, f"training.z_loss={z}").train())
        for z in (0.0, 0.1)
    )
    assert moved["loss"] == plain["loss"]
    assert moved["gradient_norm"] != pytest.approx(plain["gradient_norm"], rel=1e-3)


def test_lora_trains_its_matrices_only(data, tmp_path):
    trainer = make(data, tmp_path / "run", FOUR, "training.lora={rank: 2}")
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    records = list(trainer.train())
    changed = {
        name
        for name, weight in trainer.model.state_dict().items()
        if not torch.equal(weight, before[name])
    }
    assert changed == {name for name in before if ".lora_" in name}
    assert records[-1]["loss"] < records[0]["loss"]
    kept = load_model(RunFolder.open(tmp_path / "run").model).state_dict()
    assert all(
        torch.equal(kept[name], weight) for name, weight in trainer.model.state_dict().items()
    )


def test_denoising_with_prefixes(data, tmp_path):
    objective = "data.sources.0.objective={{kind: denoise, sentinels: [{}], tasks: [{}]}}".format(
        ", ".join(f"'{name}'" for name in SENTINELS[:30]),
        "{kind: spans, rate: 0.15, mean: 3}, {kind: prefix, sentinel: false}",
    )
    records = train(data, tmp_path / "run", objective, "training.steps=8")
    assert records[-1]["loss"] < records[0]["loss"] - 0.3
    row = next(iter(make(data, tmp_path / "other", objective).loader))[0]
    assert row.prefix_lengths is not None
    assert row.prefix_lengths.max() > 0


def test_a_model_of_transformers_trains_on_the_same_rows(data, tmp_path):
    """A Llama with our model's weights gives our model's losses."""
    from penstock import load_tokenizer
    from penstock.models.exporting import export

    ours = make(data, tmp_path / "ours", FOUR)
    tokenizer = load_tokenizer(data / "tokenizer")
    export(ours.model, tmp_path / "llama", tokenizer=tokenizer, context_length=LENGTH)
    due = list(ours.train())
    path = f"model=hf:{tmp_path / 'llama'}"
    found = train(data, tmp_path / "theirs", FOUR, path)
    np.testing.assert_allclose(values(found), values(due), rtol=1e-4)
    train(data, tmp_path / "again", FOUR, path, until=3)
    assert losses(train(data, tmp_path / "again", FOUR, path, resume=True)) == losses(found)


def test_the_trained_model_is_what_the_run_keeps(data, tmp_path):
    trainer = make(data, tmp_path / "run", FOUR)
    list(trainer.train())
    run = RunFolder.open(tmp_path / "run")
    kept = load_model(run.model)
    step = next(iter(make(data, tmp_path / "other").loader))
    with torch.no_grad():
        mine, its = (
            row_loss(model, step[0], step.loss_denominators).loss for model in (trainer.model, kept)
        )
    assert torch.equal(mine, its)
    assert run.step == 4


def test_the_functions_of_the_room_stay_functions():
    """A late name that is also a module's would turn into the module once that is imported."""
    import penstock.learn.training as room

    for _ in range(2):
        assert all(not isinstance(getattr(room, name), type(room)) for name in room.__all__)


@pytest.mark.parametrize("several", [False, True])
def test_no_collection_walks_through_old_objects_during_a_step(
    several, data, tmp_path, monkeypatch
):
    trainer = make(data, tmp_path / "run", FOUR)
    before = len(gc.get_objects())
    # Of several ranks, or on a GPU; a single process on the CPU does not pay for it.
    monkeypatch.setattr(type(trainer.ranks), "several", several)
    steps = trainer.train()
    if several:
        # What follows speaks to the others.
        monkeypatch.setattr(type(trainer.ranks), "sum", lambda self, values: list(values))
        monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: Landed())
    for _ in steps:
        assert (gc.get_freeze_count() > before / 2) == several
    assert not gc.get_freeze_count()


class Landed:
    """Work that is done at once."""

    def is_completed(self):
        return True

    def wait(self):
        return True


@pytest.mark.parametrize("own", [None, "max_split_size_mb:64"])
def test_memory_of_a_gpu_comes_in_segments_that_grow(own, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    if own is None:
        # Set first, so that it is taken away again.
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
        monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    else:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", own)
    assert local_device("auto").type == "cuda"
    assert os.environ["PYTORCH_ALLOC_CONF"] == (own or "expandable_segments:True")
