"""MMLU: the published prompt byte for byte, shots that are there or an error, and what chance
gives.
"""

import io
import json
import math

import pytest
from evaluation_makers import make_subject, spaced_tokenizer, write_mmlu
from rich.console import Console

from penstock.chat import load_template
from penstock.core.errors import ConfigError, RecordError
from penstock.learn.evaluation.mmlu import Mmlu, Question, prompt
from penstock.learn.evaluation.results import run_task, table
from penstock.learn.evaluation.subject import Subject
from penstock.learn.evaluation.tasks import TaskSettings


@pytest.fixture(scope="module")
def subject(tokenizer):
    return make_subject(tokenizer, context_length=1024)


def task(folder, **options) -> Mmlu:
    return Mmlu(TaskSettings(name="mmlu", data=str(folder), **options))


def test_the_prompt_is_the_published_one():
    """Written out by hand from evaluate.py of hendrycks/test: two spaces before the subject, one
    before a letter.
    """
    solved = Question(text="What is 1+1?", choices=("1", "2", "3", "4"), answer="B")
    asked = Question(text="What is 2+2?", choices=("4", "5", "6", "7"), answer="A")
    assert prompt("high_school_mathematics", [solved], asked) == (
        "The following are multiple choice questions (with answers) about  high school "
        "mathematics.\n\nWhat is 1+1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: B\n\nWhat is 2+2?\nA. "
        "4\nB. 5\nC. 6\nD. 7\nAnswer:"
    )


@pytest.mark.real_data
def test_the_prompt_of_a_real_question(real_data):
    made = task(real_data / "eval/mmlu", shots=1)
    first = next(one for one in made.problems() if one.group == "abstract_algebra")
    assert prompt("abstract_algebra", made._dev["abstract_algebra"][:1], first.content).startswith(
        "The following are multiple choice questions (with answers) about  abstract "
        "algebra.\n\nFind all c in Z_3 such that Z_3[x]/(x^2 + c) is a field.\nA. 0\nB. 1\nC. "
        "2\nD. 3\nAnswer: B\n\nFind the degree for the given field extension"
    )
    subjects = {
        path.name.partition("_test.csv")[0] for path in (real_data / "eval/mmlu/test").iterdir()
    }
    assert {one.group for one in made.problems()} == subjects


def test_files_with_letters_and_with_numbers_are_the_same(tmp_path):
    letters = task(write_mmlu(tmp_path / "letters", {"a_b": 6}))
    numbers = task(write_mmlu(tmp_path / "numbers", {"a_b": 6}, header=True))
    assert letters.problems() == numbers.problems()
    assert letters.fingerprint() == numbers.fingerprint()


def test_files_may_begin_with_a_byte_order_mark(tmp_path):
    plain = task(write_mmlu(tmp_path / "plain", {"law": 3}))
    for header in (False, True):
        folder = write_mmlu(tmp_path / f"marked {header}", {"law": 3}, header=header)
        for path in folder.rglob("*.csv"):
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert task(folder).fingerprint() == plain.fingerprint()


def test_missing_shots_are_an_error(tmp_path):
    folder = write_mmlu(tmp_path, {"law": 3, "art": 3}, solved=4)
    with pytest.raises(ConfigError, match=r"4.*solved.*questions.*5"):
        task(folder)
    (folder / "dev/law_dev.csv").unlink()
    with pytest.raises(ConfigError, match=r"law_dev.csv.*missing.*2.*questions"):
        task(folder, shots=2)
    assert len(task(folder, shots=0).problems()) == 6
    with pytest.raises(ConfigError, match=r"has no test/SUBJECT_test.csv"):
        task(tmp_path / "nothing")


def test_a_file_that_is_not_mmlu_is_refused(tmp_path):
    folder = write_mmlu(tmp_path, {"law": 3})
    (folder / "test/law_test.csv").write_text("a question,1,2,3,B\n")
    with pytest.raises(RecordError, match=r"law_test.csv: record 1.*3.*'B'"):
        task(folder)


def test_a_random_model_scores_by_chance(tmp_path, subject):
    """Of 400 questions whose right letters are spread evenly."""
    made = task(write_mmlu(tmp_path, {"law": 200, "biology": 200}), shots=1)
    found = run_task(made, subject, progress=False)
    chance = math.sqrt(0.25 * 0.75 / 400)
    assert abs(found.score - 0.25) < 3 * chance
    assert found.standard_error == pytest.approx(chance, rel=0.15)
    assert found.count == 400
    assert {name: count for name, (_, _, count) in found.groups.items()} == {
        "biology": 200,
        "law": 200,
    }
    macro = sum(score for score, _, _ in found.groups.values()) / 2
    assert found.figures["mean of groups"][0] == pytest.approx(macro)


def test_the_likeliest_letter_is_chosen(tmp_path, subject):
    made = task(write_mmlu(tmp_path, {"law": 12}), shots=2)
    problems = made.problems()
    answers = list(made.answer(subject, problems))
    shots = made._dev["law"][:2]
    for problem, answer in zip(problems, answers, strict=True):
        text = prompt("law", shots, problem.content)
        logs = [
            subject.log_likelihoods([subject.continuation(text, f" {letter}")])[0].log_probability
            for letter in "ABCD"
        ]
        assert answer.detail["log_probabilities"] == pytest.approx(logs, abs=1e-4)
        assert answer.detail["chosen"] == "ABCD"[logs.index(max(logs))]
        assert answer.score == (answer.detail["chosen"] == problem.content.answer)


def test_shots_that_do_not_fit_are_left_out_and_counted(tmp_path, subject):
    made = task(write_mmlu(tmp_path, {"law": 4}))
    problem = made.problems()[0]
    one = prompt("law", made._dev["law"][:1], problem.content)
    short = make_subject(subject.tokenizer, context_length=len(subject.continuation(one, " A")[0]))
    (requests, cut) = made._requests(short, problem)
    assert cut
    assert requests[0][0] == short.prompt_ids(one)
    assert run_task(made, short, progress=False).cut >= 1
    assert not made._requests(subject, problem)[1]


def test_through_the_template_letters_are_the_assistants(tmp_path, subject):
    made = task(write_mmlu(tmp_path, {"law": 4}), shots=1, chat=True)
    problem = made.problems()[0]
    requests, _ = made._requests(subject, problem)
    tokenizer = subject.tokenizer
    text = "".join(tokenizer.decode([token]) or "|" for token in requests[0][0])
    controls = [
        token for token in requests[0][0] if token == tokenizer.special_tokens["<|im_start|>"]
    ]
    assert len(controls) == 4
    assert text.index("The following are") < text.index("dev 0?") < text.index("test 0?")
    assert text.count("The following are") == 1
    assert [tokenizer.decode(after) for _, after in requests] == ["A", "B", "C", "D"]
    assert len(list(made.answer(subject, made.problems()))) == 4


def test_a_reply_has_the_tokens_that_the_template_gives_it(tmp_path):
    """A SentencePiece-like tokenizer puts a space before what stands alone, but not after a
    template's line.
    """
    made = spaced_tokenizer(tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert made.encode("A").tolist() == [vocabulary["▁A"]]
    subject = make_subject(made)
    asked = [{"role": "user", "content": "A or B?"}]
    context, after = subject.chat_continuation(asked, "A")
    assert context == subject.chat_ids(asked)
    assert after == [vocabulary["A"]]
    other = (
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor "
        "%}<|im_start|>"
    )
    otherwise = Subject(
        subject.model, made, context_length=64, template=load_template(other, tokenizer=made)
    )
    assert otherwise.chat_continuation(asked, "A")[1] == [vocabulary["▁A"]]


def test_missing_subjects_are_told(tmp_path, subject):
    made = task(write_mmlu(tmp_path, {"law": 2}), shots=0)
    found = run_task(made, subject, progress=False)
    assert found.to_json()["notes"] == ["1 of MMLU's 57 subjects"]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table([found]))
    assert "1 of MMLU's 57 subjects" in console.export_text()


@pytest.mark.real_data
def test_a_random_model_on_real_questions(real_data, subject):
    made = task(real_data / "eval/mmlu", shots=0, limit=2)
    found = run_task(made, subject, progress=False)
    assert found.count == 2 * len(found.groups) > 20
    assert abs(found.score - 0.25) < 3 * math.sqrt(0.25 * 0.75 / found.count)


def test_files_that_are_not_utf_8_are_named_with_their_line(tmp_path):
    folder = write_mmlu(tmp_path / "mmlu", {"law": 3})
    path = folder / "test" / "law_test.csv"
    path.write_bytes(path.read_bytes() + "Qu\xe9?,1,2,3,4,A\n".encode("latin-1"))
    line = path.read_bytes().count(b"\n")
    with pytest.raises(RecordError, match=rf"law_test.csv: line {line}.*0xe9\)"):
        task(folder)
    path.with_name("law_test.csv.gz").write_bytes(b"no gzip")
    path.unlink()
    with pytest.raises(RecordError, match=r"law_test.csv.gz.*file.*fetch"):
        task(folder)
