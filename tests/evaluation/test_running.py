"""Answers are kept and gone on with; those of anything else are refused; results have the right
errors.
"""

import json
import math

import numpy as np
import pytest
import torch
from evaluation_makers import make_subject, write_gsm8k, write_mmlu

from makers.texts import write_texts
from penstock.core.errors import ConfigError, StateError
from penstock.learn.evaluation import results as running
from penstock.learn.evaluation.bits_per_byte import BitsPerByte, windows
from penstock.learn.evaluation.mmlu import Mmlu
from penstock.learn.evaluation.results import Results, run_task, table, weighted_mean
from penstock.learn.evaluation.tasks import Answer, TaskSettings, make_task, settings_of_all


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(running, "PROBLEMS_AT_ONCE", 4)


def mmlu(folder, **options) -> Mmlu:
    return Mmlu(TaskSettings(name="mmlu", data=str(folder), **({"shots": 1} | options)))


def without_time(found: Results) -> dict:
    return {name: value for name, value in found.to_json().items() if name != "seconds"}


def test_a_stopped_run_goes_on_where_it_was(tmp_path, tokenizer):
    made, subject = mmlu(write_mmlu(tmp_path / "data", {"law": 11})), make_subject(tokenizer)
    whole = run_task(made, subject, answers=tmp_path / "whole.jsonl", progress=False)
    asked = iter([False, False, True])
    path = tmp_path / "deep/answers.jsonl"
    part = run_task(made, subject, answers=path, stop=lambda: next(asked), progress=False)
    assert (part.count, part.total) == (8, 11)
    with path.open("ab") as file:
        file.write(b'{"problem": "law/8", "sc')
    seen = []
    answer = made.answer
    made.answer = lambda subject, problems: (seen.extend(problems), answer(subject, problems))[1]
    found = run_task(made, subject, answers=path, progress=False)
    assert [one.name for one in seen] == ["law/8", "law/9", "law/10"]
    assert without_time(found) == without_time(whole)
    assert len(path.read_text().splitlines()) == 12
    assert run_task(made, subject, answers=path, progress=False).count == 11
    assert len(seen) == 3


def test_answers_of_something_else_are_refused_by_name(tmp_path, tokenizer):
    folder, path = write_mmlu(tmp_path / "data", {"law": 3}), tmp_path / "answers.jsonl"
    subject = make_subject(tokenizer)
    run_task(mmlu(folder, limit=2), subject, answers=path, progress=False)
    assert run_task(mmlu(folder, limit=3), subject, answers=path, progress=False).count == 3
    with pytest.raises(StateError, match=r"answers.*model.*folder"):
        run_task(mmlu(folder), make_subject(tokenizer, seed=2), answers=path, progress=False)
    with pytest.raises(StateError, match=r"answers of another shots \(1, now 0\)"):
        run_task(mmlu(folder, shots=0), subject, answers=path, progress=False)
    with pytest.raises(StateError, match=r"answers of another data"):
        run_task(
            mmlu(write_mmlu(tmp_path / "other", {"law": 4})), subject, answers=path, progress=False
        )
    path.write_text(path.read_text() + "broken\n")
    with pytest.raises(StateError, match=r"answers.jsonl:5.*JSON"):
        run_task(mmlu(folder), subject, answers=path, progress=False)


def test_other_shots_are_named_before_the_data_that_they_change(tmp_path, tokenizer):
    folder, path = write_gsm8k(tmp_path / "data", 3), tmp_path / "answers.jsonl"
    made = [
        make_task(TaskSettings(name="gsm8k", data=str(folder), shots=shots, max_tokens=3))
        for shots in (0, 1)
    ]
    run_task(made[0], make_subject(tokenizer), answers=path, progress=False)
    with pytest.raises(StateError, match=r"another shots \(0, now 1\)"):
        run_task(made[1], make_subject(tokenizer), answers=path, progress=False)


def test_answers_of_a_version_that_kept_all_settings_are_taken(tmp_path, tokenizer):
    folder, path = write_mmlu(tmp_path / "data", {"law": 3}), tmp_path / "answers.jsonl"
    run_task(mmlu(folder), make_subject(tokenizer), answers=path, progress=False)
    first, rest = path.read_text().split("\n", 1)
    old = json.loads(first) | {"samples": 1, "temperature": 0.0, "max_tokens": 512, "overlap": None}
    path.write_text(f"{json.dumps(old)}\n{rest}")
    assert run_task(mmlu(folder), make_subject(tokenizer), answers=path, progress=False).count == 3


def test_a_model_that_is_not_finite_has_no_score(tmp_path, tokenizer):
    subject, path = make_subject(tokenizer), tmp_path / "answers.jsonl"
    with torch.no_grad():
        next(subject.model.parameters()).fill_(math.nan)
    with pytest.raises(StateError, match=r"NaN.*earlier checkpoint"):
        run_task(
            mmlu(write_mmlu(tmp_path / "data", {"law": 3})), subject, answers=path, progress=False
        )


def test_answers_are_json_whatever_their_numbers(tmp_path, tokenizer, monkeypatch):
    made, path = mmlu(write_mmlu(tmp_path / "data", {"law": 3})), tmp_path / "answers.jsonl"
    scores = iter([1.0, math.nan, -math.inf])
    made.answer = lambda subject, problems: [
        Answer(problem=one.name, score=next(scores), detail=[-math.inf]) for one in problems
    ]
    subject = make_subject(tokenizer)
    run_task(made, subject, answers=path, progress=False)

    def refuse(name):
        raise AssertionError(name)

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [line["score"] for line in lines[1:]] == [1.0, None, None]
    assert math.isnan(run_task(made, subject, answers=path, progress=False).score)


def test_standard_errors():
    scores = np.random.default_rng(0).integers(0, 2, 50).astype(float)
    mean, error = weighted_mean(scores.tolist())
    assert mean == pytest.approx(scores.mean())
    assert error == pytest.approx(scores.std(ddof=1) / math.sqrt(50))
    assert weighted_mean([1.0, 4.0], [3.0, 1.0])[0] == pytest.approx(1.75)
    assert math.isnan(weighted_mean([1.0])[1])
    assert all(map(math.isnan, weighted_mean([])))


def test_results_as_table_and_json():
    one = Results(
        name="mmlu",
        score=0.5,
        standard_error=math.nan,
        count=3,
        groups={"law": (1.0, 0.1, 3)},
        cut=2,
        total=9,
    )
    assert json.loads(json.dumps(one.to_json(), allow_nan=False))["standard_error"] is None
    assert table([one]).row_count == 3
    assert table([one], groups=False).row_count == 2


def test_windows_predict_each_token_once():
    for count in (1, 2, 8, 9, 10, 31):
        for overlap in (0, 1, 3, 7):
            made = windows(range(count), 8, overlap)
            assert [token for _, own in made for token in own] == [*range(1, count)]
            for before, own in made:
                assert len(before) + len(own) <= 9
                assert before[-1] + 1 == own[0]
            assert all(len(before) == max(overlap, 1) for before, _ in made[1:])


def test_bits_per_byte_are_all_bits_over_all_bytes(tmp_path, tokenizer):
    texts = ["The quick brown fox.", "Größe", "A B C D " * 9]
    data = write_texts(tmp_path / "texts.jsonl", texts)
    made = BitsPerByte(TaskSettings(name="bits_per_byte", data=str(data), overlap=2))
    subject = make_subject(tokenizer, context_length=512)
    found = run_task(made, subject, progress=False)
    nats = 0.0
    for text in texts:
        ids = subject.prompt_ids(text)
        nats -= subject.log_likelihoods([(ids[:1], ids[1:])])[0].log_probability
    assert found.score == pytest.approx(
        nats / math.log(2) / sum(len(text.encode()) for text in texts), rel=1e-5
    )
    short = make_subject(tokenizer, context_length=16)
    assert run_task(made, short, progress=False).score != pytest.approx(found.score, rel=1e-3)
    assert short.num_cut == 0


def test_uniform_bits_per_byte_do_not_depend_on_windows(tmp_path, tokenizer):
    data = tmp_path / "text.txt"
    data.write_text("The lazy dog jumps. " * 20)
    subject = make_subject(tokenizer, context_length=16)
    with torch.no_grad():
        for weights in subject.model.parameters():
            weights.zero_()
    made = BitsPerByte(TaskSettings(name="bits_per_byte", data=str(data)))
    tokens = len(subject.prompt_ids(data.read_text())) - 1
    expected = tokens * math.log2(tokenizer.vocab_size) / len(data.read_bytes())
    assert run_task(made, subject, progress=False).score == pytest.approx(expected, rel=1e-5)


def test_settings_and_names_are_checked(tmp_path):
    with pytest.raises(ConfigError, match=r"'mlu'.*gsm8k, .*lm-eval:NAME"):
        make_task(TaskSettings(name="mlu"))
    with pytest.raises(ConfigError, match=r"belongs to lm-eval; run it with"):
        make_task(TaskSettings(name="lm-eval:arc_easy"))
    with pytest.raises(ConfigError, match="limit must be 1 or more, got 0"):
        TaskSettings(name="mmlu", limit=0)
    with pytest.raises(ConfigError, match=r"3.*samples.*temperature.*0.*identical"):
        TaskSettings(name="gsm8k", samples=3)
    with pytest.raises(ConfigError, match="there is no default data"):
        make_task(TaskSettings(name="bits_per_byte"))


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "mmlu", "samples": 4, "temperature": 0.7},
        {"name": "mmlu", "temperature": 0.7},
        {"name": "mmlu", "unsafe": True},
        {"name": "gsm8k", "overlap": 3},
        {"name": "bits_per_byte", "chat": True},
        {"name": "bits_per_byte", "max_tokens": 9},
        {"name": "humaneval", "shots": 2},
        {"name": "lm-eval:arc_easy", "samples": 2, "temperature": 1.0},
        {"name": "lm-eval:arc_easy", "unsafe": True},
    ],
)
def test_settings_without_a_meaning_for_the_task_are_refused(settings):
    with pytest.raises(ConfigError, match=rf"task {settings['name']}: .* no meaning.*leave.*data"):
        TaskSettings(**settings)


def test_what_none_means_may_be_said():
    plain = TaskSettings(name="mmlu", temperature=0.0, max_tokens=512)
    assert plain.used() == TaskSettings(name="mmlu").used()
    used = TaskSettings(name="gsm8k").used()
    assert (used["temperature"], used["max_tokens"]) == (0.0, 512)


def test_each_task_takes_the_settings_that_it_has():
    options = {"samples": 2, "temperature": 0.5, "shots": 1}
    mmlu, gsm8k = settings_of_all(["mmlu", "gsm8k"], {"mmlu": "x"}, options)
    assert mmlu == TaskSettings(name="mmlu", data="x", shots=1)
    assert gsm8k == TaskSettings(name="gsm8k", **options)
    with pytest.raises(ConfigError, match="overlap has no meaning"):
        settings_of_all(["mmlu", "gsm8k"], {}, {"overlap": 3})
    with pytest.raises(ConfigError, match="shots: settings of tasks, and no task is named"):
        settings_of_all([], {}, {"shots": 1})
