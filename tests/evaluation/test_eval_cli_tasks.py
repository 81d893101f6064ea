"""`penstock eval --task`: from an exported model to a table, JSON and kept answers."""

import json
import sys
from pathlib import Path

import pytest
from evaluation_makers import make_subject, make_tokenizer, write_gsm8k, write_mmlu

import penstock as ps
from makers.tokenizers import CHATML
from penstock.chat import load_template
from penstock.core.errors import ConfigError, MissingExtraError, StateError
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


def names(output):
    return [one["name"] for one in json.loads((output / "results.json").read_text())["tasks"]]


def test_results_of_other_tasks_stay(model, tmp_path, monkeypatch):
    run, output = ps.open_run(model), tmp_path / "out"
    gsm8k, text = str(write_gsm8k(tmp_path / "gsm8k", 4)), tmp_path / "text.txt"
    text.write_text("The quick brown fox\n")
    options = {"output": output, "device": "cpu", "threads": 1}
    run.evaluate("gsm8k", data=gsm8k, shots=0, limit=1, max_tokens=3, **options)
    monkeypatch.chdir(Path(model).parent)
    ps.open_run("hf").evaluate("bits_per_byte", data=str(text), **options)
    assert names(output) == ["gsm8k", "bits_per_byte"]
    run.evaluate("gsm8k", data=gsm8k, shots=0, limit=2, max_tokens=3, **options)
    assert names(output) == ["bits_per_byte", "gsm8k"]
    with pytest.raises(StateError, match=r"another context_length \(512, now 64\).*folder"):
        run.evaluate("bits_per_byte", data=str(text), context_length=64, **options)
    with pytest.raises(ConfigError, match="samples: settings of tasks, and no task is named"):
        run.evaluate(samples=2)


def test_a_task_is_given_once_a_folder(model, tmp_path):
    run, gsm8k = ps.open_run(model), str(write_gsm8k(tmp_path / "gsm8k", 4))
    twice = [
        ps.evaluation.TaskSettings(name="gsm8k", data=gsm8k, shots=shots, limit=1, max_tokens=3)
        for shots in (0, 2)
    ]
    with pytest.raises(ConfigError, match=r"gsm8k is given twice.*output"):
        run.evaluate(*twice, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert len(run.evaluate(*twice, device="cpu", threads=1)["tasks"]) == 2


def test_results_are_kept_if_a_later_task_fails(model, tmp_path, monkeypatch):
    places = [
        f"mmlu={write_mmlu(tmp_path / 'mmlu', {'law': 2})}",
        f"gsm8k={write_gsm8k(tmp_path / 'gsm8k', 2)}",
    ]
    monkeypatch.setattr("penstock.learn.evaluation.gsm8k.Gsm8k.answer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division"):
        evaluate(
            model=model, task=["mmlu", "gsm8k"], task_data=places, shots=0,
            output=tmp_path / "out", device="cpu", threads=1,
        )  # fmt: skip
    assert names(tmp_path / "out") == ["mmlu"]


def test_a_task_that_lm_eval_has_not_is_told_before_anything_runs(model, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    (tmp_path / "tasks").mkdir()
    options = {
        "task": ["mmlu", "lm-eval:nowhere"],
        "task_data": [
            f"mmlu={write_mmlu(tmp_path / 'mmlu', {'law': 2})}",
            f"lm-eval:nowhere={tmp_path / 'tasks'}",
        ],
    }
    monkeypatch.setattr("penstock.learn.evaluation.mmlu.Mmlu.answer", lambda *_: 1 / 0)
    with pytest.raises(ConfigError, match=r"lm-eval: nowhere: KeyError: Spec 'nowhere'"):
        evaluate(model=model, **options, device="cpu", threads=1)
    monkeypatch.setitem(sys.modules, "penstock.learn.evaluation.lm_eval_loading", None)
    monkeypatch.delattr("penstock.learn.evaluation.lm_eval_loading", raising=False)
    with pytest.raises(MissingExtraError, match=r"lm-eval.*pip install 'penstock\[eval\]'"):
        evaluate(model=model, **options, device="cpu", threads=1)
