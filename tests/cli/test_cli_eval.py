"""`penstock eval`: the figures of the trainer's own evaluator, from a run or an exported folder,
alone.
"""

import json

import pytest

from makers.datasets import prepare_here
from makers.tokenizers import tiny_tokenizer
from penstock.core.errors import ConfigError
from penstock.learn.training.metrics import read_metrics
from penstock.use.cli.eval import run as evaluate
from penstock.use.cli.export import run as export


def figures(capsys, model, **options):
    capsys.readouterr()
    evaluate(model=str(model), **options, as_json=True, device="cpu", threads=1)
    return json.loads(capsys.readouterr().out)


def test_a_run_and_its_export_have_the_loss_that_training_told(made, tmp_path, capsys):
    export(model=str(made / "plain"), output=tmp_path)
    data = [str(made / "text/validation"), str(made / "text/train")]
    of_run, of_export = (figures(capsys, model, data=data) for model in (made / "plain", tmp_path))
    assert (of_run["step"], of_export["step"], of_run["context_length"]) == (6, None, 64)
    for mine, exported in zip(of_run["results"], of_export["results"], strict=True):
        assert mine == exported
    last = read_metrics(made / "plain")[-1]
    for name in ("loss", "targets", "bits_per_byte"):
        assert of_run["results"][0][name] == pytest.approx(last[f"held out/{name}"], rel=1e-6)


def test_rows_and_context_length(made, capsys):
    data = [str(made / "text/train")]
    all_of_it, some, short = (
        figures(capsys, made / "plain", data=data, **options)["results"][0]
        for options in ({}, {"rows": 8}, {"context_length": 8})
    )
    assert some["targets"] < all_of_it["targets"]
    assert "bits_per_byte" not in some
    assert short["loss"] != all_of_it["loss"]


def test_the_table_of_text_and_chats(made, capsys):
    """Of chats only what the assistant says is a target, so there are no bits of all bytes."""
    evaluate(
        model=str(made / "chat"),
        data=[str(made / "text/validation"), str(made / "chats")],
        device="cpu",
        threads=1,
    )
    head, text, chats = [line.split() for line in capsys.readouterr().out.strip().splitlines()]
    assert head == ["dataset", "targets", "nats", "a", "target", "bits", "a", "byte"]
    assert float(text[-1]) > 0
    assert chats[-1] == "–"
    assert float(chats[-2]) > 0


def test_data_of_another_tokenizer_is_refused(made, tmp_path):
    tiny_tokenizer(tmp_path / "tokenizer", ["other words"], 262)
    prepare_here(iter(["words"]), tmp_path / "tokenizer", tmp_path / "data")
    with pytest.raises(ConfigError, match=r"prepared.*tokenizer.*model's"):
        evaluate(model=str(made / "plain"), data=[str(tmp_path / "data")], device="cpu")
