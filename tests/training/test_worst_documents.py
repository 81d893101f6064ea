"""The held-out documents with the highest loss, and the share of targets that are predicted right:
against each document alone.
"""

import re

import pytest
import torch
from training_makers import make, on_two_processes, train

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.learn.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("plain_torch")

LINE = re.compile(
    r"(?P<source>.+) (?P<origin>\S*:\d+) \(document (?P<number>\d+)"
    r"(?: from token (?P<first>\d+))?\): (?P<loss>[\d.]+) nats a target, "
    r"(?P<right>[\d,]+) of (?P<targets>[\d,]+) right"
)


def evaluator(data, tmp_path, setting, *assignments):
    look = f"training.evaluators={{held: {setting.replace('DATA', str(data / 'data'))}}}"
    trainer = make(data, tmp_path / "run", look, *assignments, dry_run=True)
    [(_, look)] = trainer.evaluators.values()
    return trainer.model, look


def figures(data, tmp_path, setting, *assignments):
    model, look = evaluator(data, tmp_path, setting, *assignments)
    return look(model)


def by_hand(model, dataset):
    """(mean loss, targets, right) of each document that has a target, alone."""
    found = {}
    for number in range(len(dataset)):
        tokens = torch.from_numpy(dataset[number].tokens.astype("int64"))
        if len(tokens) < 2:
            continue
        logits = torch.stack(list(logits_of(model, tokens)))
        nats = torch.nn.functional.cross_entropy(logits, tokens[1:])
        right = int((logits.argmax(1) == tokens[1:]).sum())
        found[number] = float(nats), len(tokens) - 1, right
    return found


def logits_of(model, tokens):
    cache = model.new_cache(1, len(tokens))
    for token in tokens[:-1]:
        yield model.extend(token.view(1, 1), torch.ones(1, dtype=torch.int64), cache)[0].double()


@torch.no_grad()
def test_they_are_the_worst_of_all_documents_alone(data, tmp_path):
    model, look = evaluator(data, tmp_path, "{data: DATA/validation, worst: 4}")
    dataset = ps.open_dataset(data / "data" / "validation")
    expected = by_hand(model, dataset)
    found = look(model)
    order = sorted(expected, key=lambda number: -expected[number][0])[:4]
    assert [name for name in found if name.startswith("worst")] == [
        f"worst.{number}" for number in range(1, 5)
    ]
    for place, number in enumerate(order, 1):
        line = LINE.fullmatch(found[f"worst.{place}"])
        loss, targets, right = expected[number]
        assert (line["source"], int(line["number"])) == ("held out", number)
        assert line["origin"] == str(dataset[number].origin)
        assert float(line["loss"]) == pytest.approx(loss, abs=1e-4)
        assert (int(line["targets"]), int(line["right"])) == (targets, right)
    counts = [sum(one[part] for one in expected.values()) for part in (1, 2)]
    assert found["accuracy"] == counts[1] / counts[0]


@pytest.mark.parametrize(
    ("setting", "more"),
    [
        ("{data: DATA/validation}", ()),
        ("{data: DATA/validation, rows: 3}", ()),
        ("{data: DATA/validation, objective: {preset: ul2r, modes: null}}", ()),
        (
            "{sources: [{path: DATA/validation, share: 3}, {path: DATA/train, share: 1}]}",
            ("model.prediction_heads=2",),
        ),
    ],
)
def test_the_other_figures_stay_the_same(data, tmp_path, setting, more):
    plain = figures(data, tmp_path, setting, *more)
    found = figures(data, tmp_path, setting.replace("{", "{worst: 2, ", 1), *more)
    for name, value in plain.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    assert set(found) - set(plain) == {"accuracy", "worst.1", "worst.2"}


def test_a_document_that_was_cut_is_named_by_its_part(data, tmp_path):
    found = figures(
        data, tmp_path, "{data: DATA/validation, worst: 30}", "data.loader.sequence_length=8"
    )
    lines = [LINE.fullmatch(found[f"worst.{number}"]) for number in range(1, 31)]
    assert any(line["first"] for line in lines)
    assert len({(line["number"], line["first"]) for line in lines}) == 30


def test_more_than_there_are(data, tmp_path):
    found = figures(data, tmp_path, "{data: DATA/validation, rows: 1, worst: 500}")
    assert 0 < sum(name.startswith("worst.") for name in found) < 64


def test_records_hold_them_as_texts(data, tmp_path):
    look = f"training.evaluators={{held: {{data: {data}/data/validation, worst: 1, every: 2}}}}"
    *_, last = train(data, tmp_path / "run", look, "training.steps=3")
    assert LINE.fullmatch(last["held/worst.1"])
    assert 0 <= last["held/accuracy"] <= 1
    [found] = ps.open_run(tmp_path / "run").evaluate(data / "data" / "validation", worst=1)[
        "results"
    ]
    ours, theirs = (
        LINE.fullmatch(one)["number"] for one in (last["held/worst.1"], found["worst.1"])
    )
    assert ours == theirs


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("{data: x, worst: -1}", "evaluators.worst must be 0 or more, got -1"),
        ("{kind: samples, worst: 3}", "worst goes with kind loss, and this one's is samples"),
    ],
)
def test_numbers_that_mean_nothing(data, tmp_path, setting, message):
    with pytest.raises(ConfigError, match=message):
        make(data, tmp_path / "run", f"training.evaluators={{a: {setting}}}")


@pytest.mark.slow
def test_two_ranks_find_the_same(data, tmp_path):
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
    options = (
        f"training.evaluators={{held: {{data: {data}/data/validation, worst: 5, every: 2}}}}",
        "training.steps=3",
    )
    [*_, one] = train(data, tmp_path / "one", *options)
    on_two_processes(tmp_path / "script.py", code, data, tmp_path / "two", *options)
    [*_, two] = read_metrics(tmp_path / "two")
    names = [name for name in one if name.startswith("held/worst")]
    assert len(names) == 5
    for name in names:
        ours, theirs = (LINE.fullmatch(record[name]) for record in (one, two))
        assert ours["number"] == theirs["number"]
        assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), abs=2e-4)
    assert one["held/accuracy"] == pytest.approx(two["held/accuracy"], abs=2e-3)
