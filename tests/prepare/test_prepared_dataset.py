"""What `prepare` returns: a dataset with its report, which it also has when it is opened later."""

import json
import pickle
import shutil

import pytest

import penstock as ps
from makers.datasets import prepare_here
from penstock.core.errors import ConfigError, CorruptionError


def prepared(corpus, tokenizer, output, **options):
    return ps.prepare(
        f"{corpus}/*.jsonl",
        tokenizer=tokenizer,
        output=output,
        **{"processes": 1, "progress": False, "part_bytes": 12_000, **options},
    )


def test_a_loader_takes_what_prepare_returns(corpus, tokenizer, tmp_path):
    train = prepared(corpus, tokenizer, tmp_path / "web", validation=0.3)
    assert isinstance(train, ps.Dataset)
    assert train.path == tmp_path / "web" / "train"
    assert len(train) + len(train.validation) == train.report.documents
    for dataset in (train, train.validation):
        step = next(iter(ps.Loader(dataset, sequence_length=64, rows_per_step=2)))
        assert step.arrays()["tokens"].shape == (2, 64)


def test_without_a_share_there_is_no_dataset_for_validation(corpus, tokenizer, tmp_path):
    web = prepared(corpus, tokenizer, tmp_path / "web")
    with pytest.raises(ConfigError, match=r"web: .*validation=0\.01"):
        _ = web.validation


@pytest.mark.parametrize("where", ["s3://bucket/web", None])
@pytest.mark.parametrize("validation", [0.0, 0.3])
def test_an_opened_dataset_has_the_report(store, corpus, tokenizer, tmp_path, where, validation):
    where = where or str(tmp_path / "web")
    made = prepared(corpus, tokenizer, where, validation=validation)
    places = [f"{where}/{name}" for name in ("train", "validation")] if validation else [where]
    assert made == ps.open_dataset(places[0])
    for place in places:
        found = ps.open_dataset(place).report
        assert found.as_json(lasting=True) == made.report.as_json(lasting=True)
        assert found.output == where
        assert {name: one.path for name, one in found.splits.items()} == {
            name: one.path for name, one in made.report.splits.items()
        }
    if validation:
        assert made.validation == ps.open_dataset(places[1])
        assert made.validation.report.records == made.report.records
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert again.report.as_json(lasting=True) == made.report.as_json(lasting=True)


def test_the_report_is_of_this_run_and_a_stored_one_of_none(corpus, tokenizer, tmp_path):
    first = prepared(corpus, tokenizer, tmp_path / "web")
    again = prepared(corpus, tokenizer, tmp_path / "web")
    assert first.report.seconds is not None
    assert again.report.seconds is None
    assert "already prepared" in str(again.report)
    assert again == first


def test_datasets_that_no_preparation_made_have_no_report(corpus, tokenizer, tmp_path):
    assert ps.write_dataset(tmp_path / "own", [[1, 2, 3]]).report is None
    web = prepared(corpus, tokenizer, tmp_path / "web")
    # A report next to another dataset is not that dataset's.
    shutil.copy(tmp_path / "web" / "report.json", tmp_path / "own" / "report.json")
    assert ps.open_dataset(tmp_path / "own").report is None
    (tmp_path / "own" / "report.json").write_text('{"splits": 3}')
    assert ps.open_dataset(tmp_path / "own").report is None
    ps.write_dataset(tmp_path / "web2" / "train", [[1, 2, 3]])
    shutil.copy(tmp_path / "web" / "report.json", tmp_path / "web2" / "report.json")
    assert ps.open_dataset(tmp_path / "web2" / "train").report is None
    assert ps.open_dataset([tmp_path / "web", web.path.parent / "own"][:1]).report is not None


@pytest.mark.parametrize("harm", ["text", "count", "field", "missing", "deep"])
def test_a_damaged_report_is_an_error_with_its_file(corpus, tokenizer, tmp_path, harm):
    web = prepared(corpus, tokenizer, tmp_path / "web")
    path = tmp_path / "web" / "report.json"
    value = json.loads(path.read_text())
    if harm == "count":
        value["records"] += 1
    elif harm == "field":
        value["surprise"] = 1
    elif harm == "missing":
        del value["rejects"]
    text = {"text": path.read_text()[:-9], "deep": "[" * 100_000}.get(harm, json.dumps(value))
    path.write_text(text)
    opened = ps.open_dataset(tmp_path / "web")
    with pytest.raises(CorruptionError, match=r"web/report\.json: damaged"):
        _ = opened.report
    assert web.report.documents == len(opened)


def test_an_empty_dataset_for_training_is_returned_too(tokenizer, tmp_path):
    train = ps.prepare(
        iter(["one", "two"]), tokenizer=tokenizer, output=tmp_path / "web",
        validation=0.999, progress=False,
    )  # fmt: skip
    assert (len(train), len(train.validation)) == (0, 2)
    assert "train is empty" in str(train.report)


def test_a_shard_that_was_removed_meanwhile_is_noticed(corpus, tokenizer, tmp_path):
    web = prepared(corpus, tokenizer, tmp_path / "web")
    next(iter(web.path.glob("*.arrow"))).unlink()
    with pytest.raises(CorruptionError, match=r"\.arrow: "):
        prepare_here(f"{corpus}/*.jsonl", tokenizer, tmp_path / "web", part_bytes=12_000)


def test_a_store_that_was_emptied_is_prepared_into_again(store, corpus, tokenizer):
    """The copies here know the stamps of the first upload; the second one is as good."""
    made = prepared(corpus, tokenizer, "s3://bucket/web", validation=0.3)
    shutil.rmtree(store.folder / "bucket" / "web")
    again = prepared(corpus, tokenizer, "s3://bucket/web", validation=0.3)
    assert (again, again.validation) == (made, made.validation)
    assert (again[0].tokens == made[0].tokens).all()
