"""metrics.jsonl, what is added to records, and who else gets them."""

import json
import sys

import pytest

from penstock.core.errors import FormatError, OutputError
from penstock.core.terminal import clock, visible
from penstock.learn.training.metrics import Metrics, read_metrics
from penstock.learn.training.progress_line import evaluation_lines, note


def record(step: int, **more) -> dict:
    return {
        "step": step,
        "loss": 5.0 / step,
        "learning_rate": 1e-3,
        "tokens": 100 * step,
        "targets": 90.0 * step,
        "seconds": 0.4,
        "wait_seconds": 0.1,
        **more,
    }


def write(run, steps, total=10, **options) -> None:
    with Metrics(run, total_steps=total, done=steps.start - 1, **options) as metrics:
        for step in steps:
            metrics.see(record(step))


def test_records_and_what_is_added(tmp_path, capsys):
    write(tmp_path, range(1, 4))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[2] == record(3) | {
        "percent": 30.0,
        "seconds_left": 3.5,
        "tokens_per_second": 200.0,
    }
    assert (
        "step 1/10 (10%): loss 5.0000 · rate 1.0e-03 · data 20% · 0:04 left"
        in capsys.readouterr().err
    )


def test_a_line_is_in_the_file_when_see_returns(tmp_path):
    with Metrics(tmp_path, total_steps=5) as metrics:
        metrics.see(record(1))
        assert len(read_metrics(tmp_path)) == 1


@pytest.mark.parametrize("torn", ["", '{"step": 8, "lo'])
def test_a_resumed_run_has_no_step_twice(tmp_path, torn):
    write(tmp_path, range(1, 8))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, 8))
    write(tmp_path, range(5, 11))
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, 11))


def test_a_new_run_begins_a_new_file(tmp_path):
    write(tmp_path, range(1, 8))
    write(tmp_path, range(1, 3))
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


def test_every_nth_and_evaluations_and_the_last_are_kept(tmp_path, capsys):
    with Metrics(tmp_path, total_steps=10, every=4) as metrics:
        for step in range(1, 11):
            metrics.see(record(step, **({"held out/loss": 1.5} if step == 5 else {})))
    assert [r["step"] for r in read_metrics(tmp_path)] == [4, 5, 8, 10]
    assert "step 5: held out loss 1.5000" in capsys.readouterr().err


def test_an_evaluator_has_one_line_for_its_numbers_and_one_for_each_text() -> None:
    shown = record(1) | {
        "a/loss": 1.25,
        "a/targets": 13002.0,
        "b/mean loss.source.x/y": 2,
        "b/sample": "two\nlines",
    }
    assert evaluation_lines(shown) == [
        "a loss 1.2500 · targets 13,002",
        "b mean loss.source.x/y 2",
        "b/sample " + visible("two\nlines", lines=True),
    ]


def test_other_processes_write_nothing(tmp_path, capsys):
    write(tmp_path, range(1, 3), shown=False)
    assert not list(tmp_path.iterdir())
    assert not capsys.readouterr().err


def test_what_is_not_finite_is_null(tmp_path):
    nan = float("nan")
    with Metrics(tmp_path, total_steps=5) as metrics:
        metrics.see(record(1) | {"loss": nan, "held/each": [1.0, {"a": nan}]})
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert read_metrics(tmp_path)[0]["loss"] is None
    assert read_metrics(tmp_path)[0]["held/each"] == [1.0, {"a": None}]


@pytest.mark.parametrize("done", [0, 40])
def test_the_time_left_does_not_depend_on_a_slow_first_step(tmp_path, done):
    with Metrics(tmp_path, total_steps=100, done=done) as metrics:
        metrics.see(record(done + 1, seconds=60.0))
        left = [metrics.see(record(done + step))["seconds_left"] for step in (2, 3, 4)]
    assert left == [round(0.5 * (100 - done - step), 1) for step in (2, 3, 4)]


def test_reading_what_is_no_run(tmp_path):
    with pytest.raises(FormatError, match="give the folder of a run"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("rubbish\n{}\n")
    with pytest.raises(FormatError, match=r"metrics\.jsonl:1.*'rubbish'"):
        read_metrics(tmp_path)


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another run folder"):
        Metrics(tmp_path / "file", total_steps=1)


def test_in_a_terminal_there_is_a_live_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    write(tmp_path, range(1, 11))
    shown = capsys.readouterr().err
    assert "training" in shown
    assert "loss 0.5000" in shown


def test_words():
    assert clock(3725) == "1:02:05"
    assert clock(65) == "1:05"
    assert note({"seconds": 1.0, "wait_seconds": 0.0, "tokens_per_second": 12345}) == "12.3 k tok/s"


def test_a_narrow_terminal_loses_what_matters_least():
    record = {
        "loss": 3.214,
        "distillation": 0.42,
        "learning_rate": 1e-3,
        "tokens_per_second": 12345,
        "seconds": 1.0,
        "wait_seconds": 0.02,
    }
    whole = "loss 3.2140 · distill 0.4200 · rate 1.0e-03 · 12.3 k tok/s · data 2%"
    assert note(record) == note(record, len(whole)) == whole
    assert note(record, len(whole) - 1) == whole.removesuffix(" · data 2%")
    assert note(record, 44) == "loss 3.2140 · distill 0.4200 · 12.3 k tok/s"
    assert note(record, 40) == "loss 3.2140 · distill 0.4200"
    assert note(record, 5) == "loss 3.2140"
