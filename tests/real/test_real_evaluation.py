"""MMLU and GSM8K on a real model against lm-eval's own tasks and model, question by question."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from real_report import Report, to

import penstock as ps

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]

SUBJECTS, QUESTIONS, SHOTS = 2, 6, 2
PROBLEMS, TOKENS = 4, 48


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> Any:
    """lm-eval's model of the folder, by transformers."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(smollm2), device="cpu", dtype="float32", batch_size=1)


def their_task(name: str, rows: dict[str, list[Any]], **changed: Any) -> dict[str, Any]:
    """A task as lm-eval publishes it, over rows from a file in place of those of the hub."""
    import datasets
    import lm_eval
    import yaml

    file = Path(lm_eval.__file__).parent / "tasks" / name
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    if "include" in config:
        config = (
            yaml.safe_load((file.parent / config.pop("include")).read_text(encoding="utf-8"))
            | config
        )
    for of_hub in ("dataset_path", "dataset_name", "tag"):
        config.pop(of_hub, None)
    splits = {split: datasets.Dataset.from_list(each) for split, each in rows.items()}
    return {
        **config,
        "custom_dataset": lambda **_: splits,
        "fewshot_config": {"sampler": "first_n"},
        **changed,
    }


def run_theirs(
    model: Any, tasks: list[dict[str, Any]], limit: int
) -> dict[str, list[dict[str, Any]]]:
    """lm-eval's answer to each question."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks,
        limit=limit,
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    return {
        name: sorted(samples, key=lambda one: one["doc_id"])
        for name, samples in found["samples"].items()
    }


def run_ours(
    folder: Path, name: str, data: Path, output: Path, **settings: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """penstock's answer to each question, and the task's result."""
    result = ps.open_run(folder).evaluate(name, data=str(data), output=output, **settings)["tasks"][
        0
    ]
    lines = (output / name / "answers.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    return [json.loads(line) for line in lines], result


def mmlu_rows(folder: Path, subject: str, split: str) -> list[dict[str, Any]]:
    """A split of a subject, as the hub has it."""
    plain = folder / split / f"{subject}_{split}.csv"
    packed = plain.with_name(f"{plain.name}.gz")
    text = (
        plain.read_text("utf-8")
        if plain.exists()
        else gzip.decompress(packed.read_bytes()).decode("utf-8")
    )
    rows = [
        row for row in csv.reader(text.splitlines(keepends=True)) if row[0] != "question"
    ]  # some have a header
    letters = [row[5] if row[5] in "ABCD" else "ABCD"[int(row[5])] for row in rows]
    return [
        {"question": row[0], "choices": row[1:5], "answer": "ABCD".index(letter)}
        for row, letter in zip(rows, letters, strict=True)
    ]


@pytest.fixture(scope="module")
def few(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MMLU with some of its subjects alone."""
    folder = tmp_path_factory.mktemp("mmlu")
    chosen = sorted((questions / "mmlu" / "test").glob("*_mathematics_test.csv"))
    chosen += sorted({*(questions / "mmlu" / "test").glob("*_test.csv")} - {*chosen})
    for file in chosen[:SUBJECTS]:
        dev = questions / "mmlu" / "dev" / file.name.replace("_test.", "_dev.")
        for source in (file, dev if dev.exists() else dev.with_name(f"{dev.name}.gz")):
            target = folder / source.parent.name / source.name
            target.parent.mkdir(exist_ok=True)
            target.symlink_to(source)
    return folder


def test_mmlu_is_that_of_lm_eval(
    smollm2: Path, theirs: Any, few: Path, tmp_path: Path, report: Report
) -> None:
    """Each letter's log-likelihood, and so each choice, and the score."""
    subjects = sorted(file.name.removesuffix("_test.csv") for file in (few / "test").iterdir())
    tasks = [
        their_task(
            f"mmlu/default/mmlu_{subject}.yaml",
            {split: mmlu_rows(few, subject, split) for split in ("dev", "test")},
            num_fewshot=SHOTS,
        )
        for subject in subjects
    ]
    for task in tasks:
        # As published, with two spaces before the subject; lm-eval writes one.
        task["description"] = task["description"].replace("about ", "about  ")
    expected = run_theirs(theirs, tasks, QUESTIONS)
    answers, result = run_ours(smollm2, "mmlu", few, tmp_path, limit=QUESTIONS, shots=SHOTS)
    theirs_flat = [sample for subject in subjects for sample in expected[f"mmlu_{subject}"]]
    assert len(answers) == len(theirs_flat) >= 5
    logs = [[float(value[0]) for value in sample["filtered_resps"]] for sample in theirs_flat]
    worst = 0.0
    for answer, wanted, sample in zip(answers, logs, theirs_flat, strict=True):
        ours = answer["detail"]["log_probabilities"]
        assert ours == pytest.approx(wanted, abs=1e-3), answer["problem"]
        assert answer["score"] == sample["acc"]
        worst = max(worst, *(abs(a - b) for a, b in zip(ours, wanted, strict=True)))
    assert result["score"] == pytest.approx(
        sum(sample["acc"] for sample in theirs_flat) / len(theirs_flat)
    )
    report.add(
        f"MMLU on SmolLM2, {SHOTS}-shot, {len(answers)} questions of {', '.join(subjects)}: score",
        f"{result['score']:.3f} ± {result['standard_error']:.3f}",
        "lm-eval's own task with `HFLM`: the same answers, each letter's log-likelihood "
        f"equal {to(worst)}",
    )


def test_gsm8k_is_that_of_lm_eval(
    smollm2: Path, theirs: Any, questions: Path, tmp_path: Path, report: Report
) -> None:
    """Each written solution, character by character, up to the stop."""
    folder = questions / "gsm8k"
    rows = {split: jsonl(folder, split) for split in ("train", "test")}
    until = {"until": ["Question:", "<|im_end|>"], "do_sample": False, "max_gen_toks": TOKENS}
    task = their_task("gsm8k/gsm8k.yaml", rows, num_fewshot=SHOTS, generation_kwargs=until)
    samples = run_theirs(theirs, [task], PROBLEMS)["gsm8k"]
    strict = [sample for sample in samples if sample["filter"] == "strict-match"]
    answers, result = run_ours(
        smollm2, "gsm8k", folder, tmp_path, limit=PROBLEMS, shots=SHOTS, max_tokens=TOKENS
    )
    assert len(answers) == len(strict) == PROBLEMS
    texts = [answer["detail"]["replies"][0] for answer in answers]
    assert [text.strip() for text in texts] == [sample["resps"][0][0].strip() for sample in strict]
    assert len({*texts}) == PROBLEMS
    report.add(
        f"GSM8K on SmolLM2, {SHOTS}-shot, {PROBLEMS} problems of at most {TOKENS} tokens: score",
        f"{result['score']:.3f} ± {result['standard_error']:.3f}",
        "lm-eval's own task with `HFLM`: the same solutions, character by character",
    )


def jsonl(folder: Path, split: str) -> list[Any]:
    """A split of GSM8K."""
    plain, packed = folder / f"{split}.jsonl", folder / f"{split}.jsonl.gz"
    text = (
        plain.read_text("utf-8")
        if plain.exists()
        else gzip.decompress(packed.read_bytes()).decode("utf-8")
    )
    return [json.loads(line) for line in text.splitlines()]
