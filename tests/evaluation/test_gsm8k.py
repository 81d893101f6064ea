"""GSM8K: numbers in words are found, the prompt, and replies scored."""

from decimal import Decimal

import pytest
from evaluation_makers import make_subject, make_tokenizer, write_gsm8k

from penstock.core.errors import ConfigError, RecordError
from penstock.learn.evaluation.gsm8k import Gsm8k, final_number, prompt
from penstock.learn.evaluation.results import run_task
from penstock.learn.evaluation.tasks import TaskSettings
from penstock.learn.generation import Generated


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He has 3.\n#### 1,234", "1234"),
        ("so $-5.50.", "-5.5"),
        ("12-3 = 9.", "9"),
        ("-$5", "-5"),
        ("25%", "25"),
        ("#### -3 apples\nThen 7 more", "-3"),
        ("costs $1,000.50!", "1000.5"),
        ("a −4 degrees", "-4"),
        (".5", "0.5"),
        ("1,2,3", "3"),
        ("#### $18", "18"),
        ("####\n7", "7"),
        ("#### none\nso 8", "8"),
        ("#### 4\n#### 5", "4"),
        ("3.0", "3"),
        ("1,234,567 km/h", "1234567"),
        ("The answer is:\n- 18", "18"),
        ("Final answer - 18", "18"),
        ("Week 2 − 14 eggs", "14"),
        ("5 + 3 - 26 = - 18", "-18"),
        ("#### - 18", "-18"),
        ("#### **$ 1,000**", "1000"),
        (r"#### \$18", "18"),
        ("I must end with #### and the number. 3 boxes of 4 make 12.\n#### 12", "12"),
        ("I end with #### and the number: 3 boxes, so 12.", "12"),
    ],
)
def test_the_number_at_the_end(text, number):
    assert final_number(text) == Decimal(number)


def test_a_reply_ends_with_its_answer():
    draft = "<think>3 + 4, so #### 8? No.</think>\n"
    assert final_number(draft + "It is 7.", chat=True) == 7
    assert final_number("First #### 8, but no:\n#### 7", chat=True) == 7
    assert final_number("#### 7\nProblem 2: one more?\n#### 8") == 7


def test_no_number():
    assert final_number("none at all, -.") is None
    assert final_number("") is None


def task(folder, **options) -> Gsm8k:
    return Gsm8k(TaskSettings(name="gsm8k", data=str(folder), **options))


class Written:
    """A subject that writes given texts."""

    context_length = 4096

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts, self.asked = tokenizer, texts, []

    def room(self, max_tokens):
        return 3000

    def prompt_ids(self, text):
        self.asked.append(text)
        return [1]

    def chat_ids(self, messages):
        return [1]

    def write(self, prompts, sampling):
        self.sampling = sampling
        return [Generated((0,), text, "stop") for text in self.texts[: len(prompts)]]


def test_replies_are_scored_and_the_prompt_has_solved_problems(tmp_path):
    made = task(write_gsm8k(tmp_path, 4), shots=2, samples=2, temperature=0.5)
    texts = ["0", "It is 1", "#### 2.00", "x\n#### 2", "", "4", "6", "7"]
    subject = Written(None, texts)
    answers = list(made.answer(subject, made.problems()))
    assert [one.score for one in answers] == [0.5, 1.0, 0.5, 0.5]
    assert subject.asked[0] == (
        "Question: train: 0 and 0?\nAnswer: 0+0=<<0+0=0>>0\n#### 0\n\n"
        "Question: train: 1 and 1?\nAnswer: 1+1=<<1+1=2>>2\n#### 2\n\n"
        "Question: test: 0 and 0?\nAnswer:"
    )
    assert len({one.seed for one in subject.sampling}) == 8
    assert subject.sampling[0].stop == ("Question:",)


def test_solved_problems_that_do_not_fit_are_left_out(tmp_path):
    made = task(write_gsm8k(tmp_path / "data", 4), shots=3, max_tokens=4)
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    room = len(
        make_subject(tokenizer).prompt_ids(prompt(made._shots[:2], made._test[1]["question"]))
    )
    subject = make_subject(tokenizer, context_length=room + 4)
    ids, cut = made._prompt(subject, made._test[1]["question"])
    assert cut
    assert ids == subject.prompt_ids(prompt(made._shots[:2], made._test[1]["question"]))
    found = run_task(made, subject, progress=False)
    assert found.count == found.cut == 4
    assert subject.num_cut == 0


def test_through_the_template(tmp_path):
    made = task(write_gsm8k(tmp_path / "data", 3), shots=1, max_tokens=4, chat=True)
    found = run_task(
        made,
        make_subject(make_tokenizer(tmp_path / "tokenizer"), context_length=512),
        progress=False,
    )
    assert (found.count, found.cut) == (3, 0)


def test_data_that_are_not_there(tmp_path):
    folder = write_gsm8k(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"train.*4.*problems.*8"):
        task(folder)
    (folder / "train.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"train.*complete.*folder"):
        task(folder)
    (folder / "test.jsonl").write_text('{"question": "q"}\n')
    with pytest.raises(RecordError, match=r"test.jsonl: record 1"):
        task(folder, shots=0)
    (folder / "test.jsonl").write_text('{"question": \n')
    with pytest.raises(RecordError, match=r"test.jsonl: line 1: not valid JSON"):
        task(folder, shots=0)
    with pytest.raises(ConfigError, match=r"test.jsonl.*folder"):
        task(folder / "test.jsonl", shots=0)


@pytest.mark.real_data
def test_real_problems_have_numbers(real_data):
    made = task(real_data / "eval/gsm8k")
    assert len(made.problems()) == 1319
    assert all(
        final_number(one["answer"])
        == Decimal(one["answer"].split("####")[1].strip().replace(",", ""))
        for one in made._test
    )


def test_a_chats_last_mark_is_scored(tmp_path):
    made = task(write_gsm8k(tmp_path, 1), shots=0, chat=True)
    (answer,) = made.answer(Written(None, ["#### 8, no\n#### 0"]), made.problems())
    assert answer.score == 1
