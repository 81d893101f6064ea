"""`trained_control_text` in prepare: from Python, the command line and a run file, into the report
and the dataset.
"""

import json
from typing import get_args

import pytest
from test_prepare_chat import prepare_chats

from makers.texts import make_chat, write_json_lines
from makers.tokenizers import CHATML
from penstock import Dataset
from penstock.chat.masks.certificate import Kind
from penstock.core.errors import RecordError
from penstock.data.reports.chat_summary import MEANINGS, ChatSummary, ProblemCounts

RECORDS = [
    make_chat("water", "pipe <|endoftext|> wheel"),
    make_chat("<|endoftext|>", "wheel"),
    make_chat("water", "wheel"),
]


@pytest.fixture
def chats(tmp_path):
    return write_json_lines(tmp_path / "chats.jsonl", RECORDS)


def test_it_stops_or_is_counted_as_rejected(tmp_path, chats, chat_tokenizer):
    with pytest.raises(RecordError, match=r"chats.jsonl:1: message 1.*'<\|endoftext"):
        prepare_chats(chats, chat_tokenizer, tmp_path / "stop")
    report = prepare_chats(chats, chat_tokenizer, tmp_path / "skip", on_error="skip")
    assert (report.documents, report.rejects) == (2, 1)
    assert report.chats["problems"]["control_text"]["conversations"] == 1
    told = report.as_text()
    assert (
        "1  message N: its own text has '<|endoftext|>', which is control text of this "
        f"tokenizer; the first: {chats}:1" in told
    )
    assert (
        "1 conversation kept: messages hold control text, which was encoded as ordinary text "
        "(forged);" in told
    )


@pytest.mark.parametrize(
    ("setting", "typed", "forged"), [("as_text", 0, 2), ("as_control_tokens", 1, 1)]
)
@pytest.mark.parametrize("way", ["python", "options", "run file"])
def test_every_way_to_say_it(
    tmp_path, chats, chat_tokenizer, command_line, setting, typed, forged, way
):
    output = tmp_path / "out"
    if way == "python":
        prepare_chats(chats, chat_tokenizer, output, trained_control_text=setting)
    else:
        chat_tokenizer.save(tmp_path / "tokenizer")
        (tmp_path / "t.jinja").write_text(CHATML)
        (tmp_path / "run.yaml").write_text(
            f"chat: {{template: {tmp_path / 't.jinja'}, trained_control_text: {setting}}}\n"
            "data: {sources: [{path: out}], loader: {sequence_length: 64, rows_per_step: 2}}\n"
        )
        options = ["--template", str(tmp_path / "t.jinja"), "--trained-control-text", setting]
        given = options if way == "options" else ["--config", str(tmp_path / "run.yaml")]
        words = [chats, "-t", tmp_path / "tokenizer", "-o", output, "--processes", 1, *given]
        assert command_line("prepare", *words)[0] == 0
    dataset = Dataset.open(output)
    assert dataset.chat.settings["mask_settings"]["trained_control_text"] == setting
    ends = [
        int((document.tokens == chat_tokenizer.special_tokens["<|endoftext|>"]).sum())
        for document in dataset[:]
    ]
    assert ends == [typed, 0, 0]
    summary = ChatSummary.from_json(json.loads((output / "report.json").read_text())["chats"])
    assert (summary.typed, summary.forged) == (typed, forged)
    line = f"control text in messages that became control tokens: {typed}"
    assert (line in summary.lines()) == bool(typed)


def test_each_problem_says_what_happened():
    assert set(MEANINGS) == set(get_args(Kind))
    summary = ChatSummary(
        problems={"dropped": ProblemCounts(conversations=50, example="a.jsonl:2: message 1: x")}
    )
    assert summary.lines()[-1] == (
        "50 conversations kept: the template leaves out a part of the messages, so that part "
        "is not in the dataset; the first: a.jsonl:2: message 1: x"
    )
