"""`penstock eval --task`: from an exported model to a table, JSON and kept answers."""

import json

import pytest
from evaluation_makers import make_subject, make_tokenizer, write_gsm8k, write_mmlu

from makers.tokenizers import CHATML
from penstock.chat import load_template
from penstock.core.errors import ConfigError
from penstock.models.exporting import export
from penstock.use.cli.eval import run as evaluate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(folder / "tokenizer")
    subject = make_subject(tokenizer)
    template = load_template(CHATML, tokenizer=tokenizer)
    export(
        subject.model,
        folder / "hf",
        tokenizer=tokenizer,
        template=template,
        stop_ids=subject.stop_ids,
        context_length=512,
    )
    return str(folder / "hf")


def test_tasks_as_json_and_as_a_table(model, tmp_path, capsys):
    places = [
        f"mmlu={write_mmlu(tmp_path / 'mmlu', {'law': 3, 'art_history': 2})}",
        f"gsm8k={write_gsm8k(tmp_path / 'gsm8k', 4)}",
    ]
    options = {
        "task": ["mmlu", "gsm8k"],
        "task_data": places,
        "shots": 1,
        "max_tokens": 6,
        "device": "cpu",
    }
    capsys.readouterr()
    evaluate(model=model, **options, output=tmp_path / "out", as_json=True, threads=1)
    reported = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["count"]) for one in reported["tasks"]] == [("mmlu", 5), ("gsm8k", 4)]
    assert json.loads((tmp_path / "out/results.json").read_text()) == reported
    assert len((tmp_path / "out/mmlu/answers.jsonl").read_text().splitlines()) == 6
    evaluate(model=model, **options, output=tmp_path / "out", threads=1)
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[0] for line in lines] == [
        "task",
        "mmlu",
        "mean",
        "2",
        "art_history",
        "law",
        "gsm8k",
    ]
    evaluate(model=model, **options, chat=True, limit=1, as_json=True, threads=1)
    assert [one["count"] for one in json.loads(capsys.readouterr().out)["tasks"]] == [2, 1]


def test_what_is_not_known_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="--data DATASET, --task NAME"):
        evaluate(model=model)
    with pytest.raises(ConfigError, match=r"no task './mmlu'; known: mmlu"):
        evaluate(model=model, task=["./mmlu"])
    with pytest.raises(ConfigError, match=r"--task-data mmlu: expected NAME=PATH"):
        evaluate(model=model, task=["mmlu"], task_data=["mmlu"])
    with pytest.raises(ConfigError, match=r"--task-data gsm8k=x.*NAME=PATH.*--task"):
        evaluate(model=model, task=["mmlu"], task_data=["gsm8k=x"])
