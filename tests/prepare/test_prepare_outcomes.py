"""The report tells what happened: findings of rejected records are part of their rejection."""

import re

import pytest

from contracts import assert_same_step
from makers.datasets import prepare_here
from makers.texts import make_texts
from makers.tokenizers import tiny_tokenizer
from penstock import Loader, Mixture, Source, inspect, open_dataset, prepare
from penstock.core.errors import ConfigError, FormatError, RecordError
from penstock.data.reports.reasons import KINDS, OTHER, SHOWN, Reasons, kind_of
from penstock.data.sources import Reject

OWN_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


@pytest.fixture
def report(tmp_path, chat_tokenizer):
    """Four good ones, two that the template opens wrongly, three without a reply, one that is
    trimmed.
    """
    chats = [[U, A]] * 4 + [[A, U, A]] * 2 + [[U]] * 3 + [[U, A, U]]
    records = [{"messages": messages} for messages in chats]
    return prepare_here(
        records,
        chat_tokenizer,
        tmp_path / "out",
        template=OWN_SYSTEM,
        on_error="skip",
        max_rejects="50%",
    )


def test_findings_of_rejected_records_are_not_those_of_kept_ones(report):
    text = str(report)
    assert (report.documents, report.rejects, report.dropped) == (5, 2, 3)
    assert " kept: " not in text.partition("conversations: ")[2].partition("\n")[2]
    assert re.search(
        r"rejected, by reason:\n +2  message N: the template begins the turn .*; the first: "
        r"<python>:4",
        text,
    )
    assert "5 of 8 conversations kept; 1 trimmed: 1 trailing messages" in text


def test_what_is_trimmed_is_in_the_dataset(report):
    cleaned = report.chats["cleaned"]
    assert (cleaned["trimmed"], cleaned["trimmed_messages"], cleaned["empty"]) == (1, 1, 3)
    assert len(open_dataset(report.output)) == cleaned["read"] - cleaned["empty"]


def test_the_templates_own_system_text_is_the_templates(report, chat_tokenizer):
    roles = report.chats["roles"]
    per_chat = len(
        chat_tokenizer.encode("<|im_start|>system\nBe helpful.<|im_end|>\n", allow_control=True)
    )
    assert roles["(template)"]["tokens"] == 5 * per_chat
    assert roles["user"]["tokens"] == 5 * len(
        chat_tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n", allow_control=True)
    )


def test_too_many_rejects_come_with_their_reasons(tmp_path, chat_tokenizer):
    records = (
        [{"messages": [U, A]}]
        + [{"messages": [U, {"role": "bot", "content": "a"}]}] * 7
        + [{"id": 1}] * 3
    )
    with pytest.raises(
        RecordError,
        match=r'\n +7  message N.*"bot".*\n +3  no known',
    ):
        prepare_here(
            records,
            chat_tokenizer,
            tmp_path / "out",
            template=OWN_SYSTEM,
            on_error="skip",
            max_rejects="10%",
        )
    with pytest.raises(
        RecordError,
        match=r'max_rejects.*\n +5  message N.*"bot"',
    ):
        prepare_here(
            records[:6],
            chat_tokenizer,
            tmp_path / "o",
            template=OWN_SYSTEM,
            on_error="skip",
            max_rejects=4,
        )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('message 3 has role "bot"; known: user', 'message 14 has role "bot"; known: user, tool'),
        ("no known layout (its fields: a, b); name them", "no known layout (its fields: c)"),
        (
            "an image is 'http://x.org/very/long/path/1.png'",
            "an image is 'http://x.org/very/long/path/2345.png'",
        ),
        ("12,345 tokens in 3 messages", "9 tokens in 41 messages"),
    ],
)
def test_reasons_that_differ_in_details_are_one(one, other):
    assert kind_of(one) == kind_of(other)


def test_reasons_that_differ_in_words_are_two():
    assert kind_of('message 3 has role "bot"') != kind_of('message 3 has role "critic"')
    assert kind_of("") == ""


def test_a_table_is_short_and_complete():
    reasons = Reasons()
    for number in range(2 * KINDS):
        for _ in range(1 + (number == 3)):
            reasons.add(Reject("a.jsonl", number, "reason " + "x" * number, ""))
    table = reasons.lines()
    assert len(table) == SHOWN + 1
    assert table[0].split() == [str(KINDS), *f"{OTHER}; the first: a.jsonl:{KINDS}".split()]
    assert table[1].startswith("         2  reason xxx; the first: a.jsonl:3")
    assert sum(int(line.split()[0]) for line in table) == 2 * KINDS + 1
    assert Reasons.total([reasons.as_json()]).lines() == table


def test_named_fields_are_a_keyword_of_python_too(tmp_path, chat_tokenizer):
    records = [{"question": "q", "answer": "a"}, {"messages": [U, A]}]
    named = {"prompt": "question", "completion": "answer"}
    report = prepare_here(
        records, chat_tokenizer, tmp_path / "out", template="chatml", fields=named
    )
    assert report.chats["layouts"] == {"prompt_completion": 1, "messages": 1}
    with pytest.raises(ConfigError, match="fields is for chats: give a template"):
        prepare_here(["a"], chat_tokenizer, tmp_path / "texts", fields=named)


def test_what_is_prepared_stands_wherever_a_path_does(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer", make_texts(100), 300)
    web = prepare(
        iter(make_texts(40)),
        tokenizer=tokenizer,
        output=tmp_path / "web",
        processes=1,
        progress=False,
    )
    first = next(iter(Loader(web, sequence_length=64, rows_per_step=2)))
    for mixture in (
        Source(web),
        [web],
        Source([web]),
        Mixture(web),
        str(tmp_path / "web"),
    ):
        assert_same_step(next(iter(Loader(mixture, sequence_length=64, rows_per_step=2))), first)
    assert len(open_dataset(web)) == len(open_dataset([web])) == 40
    inspect(web, listed=True)


def test_the_folder_of_two_datasets_says_which_there_are(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer", make_texts(100), 300)
    prepare(
        iter(make_texts(40)), tokenizer=tokenizer, output=tmp_path / "web", validation=0.3,
        processes=1, progress=False,
    )  # fmt: skip
    with pytest.raises(FormatError, match="train"):
        Loader(tmp_path / "web", sequence_length=64, rows_per_step=2)
