"""An array of conversations that is read as text: the message says to name the chat template, and
that is enough.
"""

import json

import pytest

from penstock import Dataset, prepare
from penstock.core.errors import RecordError

ARRAY = [
    {
        "id": str(number),
        "conversations": [{"from": "human", "value": "water"}, {"from": "gpt", "value": "wheel"}],
    }
    for number in range(3)
]
CURE = r"set template, and the array is read as it is: to a \.jinja file, or to auto"


@pytest.mark.parametrize("indent", [None, 1], ids=["one line", "several lines"])
@pytest.mark.parametrize("name", ["chats.json", "chats.jsonl"])
def test_the_sentence_that_a_user_needs(tmp_path, chat_tokenizer, indent, name):
    (tmp_path / name).write_text(json.dumps(ARRAY, indent=indent))
    given = {"tokenizer": chat_tokenizer, "processes": 1, "progress": False}
    with pytest.raises(RecordError, match=rf"JSON.*array.*object.*conv.*{CURE}"):
        prepare(tmp_path / name, output=tmp_path / "text", **given)
    prepare(tmp_path / name, output=tmp_path / "chats", template="chatml", **given)
    assert len(Dataset.open(tmp_path / "chats")) == 3


@pytest.mark.parametrize(
    "record",
    [
        ARRAY[0],
        {"instruction": "water", "output": "wheel"},
        {"prompt": "water", "completion": "wheel"},
    ],
)
def test_lines_of_every_layout(tmp_path, chat_tokenizer, record):
    (tmp_path / "chats.jsonl").write_text(json.dumps(record))
    with pytest.raises(RecordError, match=r"conversations.*template"):
        prepare(
            tmp_path / "chats.jsonl",
            tokenizer=chat_tokenizer,
            output=tmp_path / "out",
            progress=False,
        )
