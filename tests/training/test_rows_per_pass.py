"""Rows joined into one pass of the model: the same losses, the same resume, and refusals where it
cannot be.
"""

import shutil

import numpy as np
import pytest
import torch
from test_loss_groups import mixed
from training_makers import losses, make, on_two_processes, train, values

import penstock as ps
from makers.models import tiny_huggingface
from penstock.core.errors import ConfigError, IsolationError
from penstock.learn.training import memory
from penstock.learn.training.computing import kept_bytes
from penstock.learn.training.memory import rows_per_pass
from penstock.learn.training.utilisation import Operations
from penstock.models.row_tensors import RowTensors

pytestmark = pytest.mark.usefixtures("plain_torch")
FOUR = "training.steps=4"


def passes_of(trainer, monkeypatch):
    """Slots of each pass of one step."""
    seen = []
    monkeypatch.setattr(
        type(trainer.model), "forward", _counting(type(trainer.model).forward, seen)
    )
    next(trainer.train())
    return seen


def _counting(forward, seen):
    def call(self, row):
        seen.append(len(row.tokens) if isinstance(row, RowTensors) else None)
        return forward(self, row)

    return call


RECURRENT = (
    "model.blocks={delta: {mixer: gated_delta}, space: {mixer: mamba}}",
    "model.pattern=[delta, space]",
)


@pytest.mark.parametrize(
    "more", [(), ("model.prediction_heads=2",), ("data.attention=row",), RECURRENT], ids=str
)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_losses_are_those_of_single_rows(data, tmp_path, count, more):
    single, joined = (
        train(data, tmp_path / str(n), FOUR, f"training.rows_per_pass={n}", *more)
        for n in (1, count)
    )
    for name in ("loss", "gradient_norm"):
        assert values(joined, name) == pytest.approx(values(single, name), rel=1e-4)
    assert losses(joined) != losses(single), (
        "another order of additions rounds otherwise: were rows joined?"
    )


@pytest.mark.parametrize("more", [(), ("data.attention=row",)], ids=str)
def test_operations_are_those_of_single_rows(data, tmp_path, more, monkeypatch):
    """Most slots are padding, which is a document of a joined row."""
    counted = []

    def of(self, rows):
        counted.append(count(self, rows))
        return counted[-1]

    count = Operations.of
    monkeypatch.setattr(Operations, "of", of)
    for rows in (1, 2, 4):
        options = (FOUR, "data.loader.sequence_length=256", "data.loader.packing=none", *more)
        train(data, tmp_path / str(rows), *options, f"training.rows_per_pass={rows}")
    assert counted[:4] == counted[4:8] == counted[8:]
    assert len(set(counted)) > 1


def test_parts_of_the_loss_by_source_and_task(data, tmp_path):
    """A mixture with prefixes, a source without targets in some steps, and documents of padding in
    the middle.
    """
    single, joined = (
        train(data, tmp_path / str(n), *mixed(data), f"training.rows_per_pass={n}") for n in (1, 3)
    )
    for one, other in zip(single, joined, strict=True):
        mine, theirs = (
            {k: v for k, v in record.items() if k.startswith("loss")} for record in (one, other)
        )
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("count", ["2", "4"])
def test_it_resumes_to_the_last_bit(data, tmp_path, count):
    options = (FOUR, f"training.rows_per_pass={count}")
    whole = train(data, tmp_path / "whole", *options)
    train(data, tmp_path / "run", *options, until=2)
    assert losses(train(data, tmp_path / "run", *options, resume=True)) == losses(whole)


def test_another_number_is_reported_at_a_resume(data, tmp_path):
    train(data, tmp_path / "run", FOUR, until=3)
    said = []
    train(data, tmp_path / "run", FOUR, "training.rows_per_pass=1", resume=True, say=said.append)
    assert any("changes the last bits: rows_per_pass: 1 now, 4 then" in line for line in said)


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ((), [256]),
        (("training.rows_per_pass=3",), [192, 64]),
        (("training.rows_per_pass=1000",), [256]),
        (("training.micro_sequences=1", "training.attention=dense"), [64] * 4),
        (("data.loader.rows_per_step=40",), [1280] * 2),
    ],
    ids=str,
)
def test_how_many_rows_a_pass_has(data, tmp_path, options, slots, monkeypatch):
    assert passes_of(make(data, tmp_path / "run", FOUR, *options), monkeypatch) == slots


@pytest.mark.filterwarnings("ignore")  # of torch._dynamo itself
def test_a_compiled_model_sees_one_size(data, tmp_path):
    sizes = {
        rows: make(
            data,
            tmp_path / f"run{rows}",
            FOUR,
            f"data.loader.rows_per_step={rows}",
            "training.compile=true",
        )
        for rows in (40, 34, 37)
    }
    assert {rows: trainer.rows_per_pass for rows, trainer in sizes.items()} == {
        40: 20,
        34: 17,
        37: 1,
    }


@pytest.mark.filterwarnings("ignore")  # of torch._dynamo itself
def test_rows_with_other_documents_are_not_compiled_for(data, tmp_path, monkeypatch):
    """Once for the first row, and once more when the number of documents turns out to change."""
    compile = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **options: compile(self, backend="eager", **options),
    )
    options = ("training.compile=true", "training.steps=10", "training.rows_per_pass=2")
    # Graphs that earlier tests of this process compiled count towards the limit.
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        found = train(data, tmp_path / "run", *options)
    torch._dynamo.reset()
    assert values(found) == pytest.approx(
        values(train(data, tmp_path / "plain", *options[1:])), rel=1e-4
    )


def test_little_memory_means_fewer_rows(data, tmp_path, monkeypatch):
    trainer = make(data, tmp_path / "run", FOUR)
    per_slot = kept_bytes(trainer.model, trainer.settings, trainer.model.compute_dtype)
    monkeypatch.setattr(memory, "device_memory", lambda device: 4 * 130 * per_slot)
    assert rows_per_pass(trainer.model, trainer.loader, trainer.settings, taught=False) == 2
    monkeypatch.setattr(memory, "device_memory", lambda device: per_slot)
    assert rows_per_pass(trainer.model, trainer.loader, trainer.settings, taught=False) == 1
    assert rows_per_pass(trainer.model, trainer.loader, trainer.settings, taught=True) == 1


def test_a_loss_of_ones_own_gets_rows_unless_asked(data, tmp_path):
    seen = []

    def loss(model, row, denominators):
        seen.append(len(row.tokens))
        weights = row.loss_weights[0]
        scores = torch.nn.functional.cross_entropy(
            model.logits(model(row)[0]), row.targets[0].clamp(min=0), reduction="none"
        )
        return (scores * weights).sum() / denominators[0]

    found = {}
    for count in (None, 2):
        model = ps.build_model(layers=1, width=16, heads=2, vocab_size=340)
        loader = ps.Loader(str(data / "data" / "train"), sequence_length=64, rows_per_step=4)
        seen.clear()
        run = ps.train(
            model,
            loader,
            output=tmp_path / str(count),
            steps=2,
            loss=loss,
            rows_per_pass=count,
            progress=False,
        )
        found[count] = values(run.metrics)
        # One more call when the run begins.
        assert set(seen[1:]) == {64 * (count or 1)}
    assert found[2] == pytest.approx(found[None], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("training.rows_per_pass=2", "training.micro_sequences=2"),
            "cuts rows and rows_per_pass joins them",
        ),
        (("training.rows_per_pass=0",), r"training.rows_per_pass must be above 0, got 0"),
    ],
    ids=str,
)
def test_refusals(data, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        make(data, tmp_path / "run", *options)


def of_transformers(data, folder, kind, **settings):
    tiny_huggingface(kind, vocab_size=400, max_position_embeddings=64, **settings).save_pretrained(
        folder
    )
    shutil.copy(data / "tokenizer" / "tokenizer.json", folder)
    return f"model=hf:{folder}"


def test_a_model_that_mixes_documents_gets_rows_one_by_one(data, tmp_path, monkeypatch):
    """Each row holds one document, so the model may train; joined rows would mix them."""
    monkeypatch.setattr("penstock.models.theirs.packed_ways.TRIED", ("own",))
    model = of_transformers(data, tmp_path / "model", "bloom")
    one_each = (model, FOUR, "data.loader.packing=none")
    trainer = make(data, tmp_path / "run", *one_each)
    assert trainer.rows_per_pass == 1
    with pytest.raises(IsolationError, match="documents of one row see each other"):
        make(data, tmp_path / "joined", *one_each, "training.rows_per_pass=2")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
        ("mistral", {"sliding_window": 16}),
    ],
    ids=["llama", "learned positions", "windows"],
)
def test_models_of_transformers_get_joined_rows(data, tmp_path, kind, settings):
    model = of_transformers(data, tmp_path / "model", kind, **settings)
    trainer = make(data, tmp_path / "run", model, FOUR)
    assert trainer.rows_per_pass == 4
    single = train(data, tmp_path / "single", model, FOUR, "training.rows_per_pass=1")
    assert [record["loss"] for record in trainer.train()] == pytest.approx(values(single), rel=1e-4)


def test_a_step_in_one_call_has_the_gradients_of_its_rows(data):
    model = ps.build_model(layers=2, width=16, heads=2, vocab_size=340, dtype="float64")
    loader = ps.Loader(
        str(data / "data" / "train"),
        sequence_length=64,
        rows_per_step=5,
        requirements=model.requirements(),
    )
    step = next(iter(loader))
    found = []
    for rows in (step, *([*step.joined(n)] for n in (1, 2, 5))):
        model.zero_grad()
        if rows is step:
            total = ps.loss(model, step)
            total.backward()
        else:
            parts = [ps.loss(model, row, step.loss_denominators) for row in rows]
            total = torch.stack(parts).sum()
            total.backward()
        found.append([float(total.detach()), *(p.grad.clone() for p in model.parameters())])
    for loss, *gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-12)
        for gradient, expected in zip(gradients, found[0][1:], strict=True):
            np.testing.assert_allclose(gradient, expected, atol=1e-12)


def test_ranks_take_the_smallest_number(tmp_path):
    code = """
        import torch
        from penstock.learn.training.distributed import Ranks
        with Ranks(torch.device("cpu")) as ranks:
            print(ranks.least(3 + ranks.place.rank))
    """
    assert [out.strip() for out, _ in on_two_processes(tmp_path / "least.py", code)] == ["3", "3"]
