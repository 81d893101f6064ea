"""Conversations to a dataset: what is stored is what `chat.encode` says, every record is accounted for, all is told."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import chat
from penstock.prepare import prepare
from penstock.shards import Dataset, verify

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DATED = "{{ strftime_now('%Y-%m-%d') + '\n' }}" + CHATML
REWRITING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def run(source, tokenizer, output, template=CHATML, **options):
    options = {"processes": 1, **options}
    return prepare(source, tokenizer=tokenizer, template=template, output=output, progress=False, **options)


def turns(*texts, first="user"):
    roles = [first, "assistant" if first == "user" else "user"]
    return {"messages": [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]}


def make_chats(count):
    return [
        turns(*(f"{word} {number} wheel" for word in ("water", "pipe", "größe 🙂", "steel")[: 2 + 2 * (number % 2)]))
        for number in range(count)
    ]


@pytest.fixture
def chats(tmp_path):
    """A file of lines, a JSON array over several lines, Parquet, a saved dataset: 40 conversations each."""
    folder = tmp_path / "raw"
    folder.mkdir()
    records = make_chats(160)
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[:40]))
    (folder / "b.json").write_text(json.dumps(records[40:80], indent=1))
    pq.write_table(pa.Table.from_pylist(records[80:120]), folder / "c.parquet", row_group_size=16)
    with pa.ipc.new_stream(folder / "d.arrow", pa.Table.from_pylist(records[120:]).schema) as stream:
        stream.write_table(pa.Table.from_pylist(records[120:]))
    return folder


def assert_same_as_encode(dataset, records, tokenizer, template=CHATML, **knobs):
    assert len(dataset) == len(records)
    for document, record in zip(dataset[:], records, strict=True):
        due = chat.encode(
            record, tokenizer=tokenizer, template=chat.load_template(template, tokenizer=tokenizer), **knobs
        )
        np.testing.assert_array_equal(document.tokens, due.tokens)
        np.testing.assert_array_equal(document.loss_weights, due.loss_weights)


@pytest.mark.parametrize("knobs", [{}, {"mask_history": True, "train_on_eos": "none"}, {"train_on_inputs": True}])
def test_stored_tokens_and_weights_are_those_of_encode(tmp_path, chats, chat_tokenizer, knobs):
    report = run(chats, chat_tokenizer, tmp_path / "out", **knobs)
    dataset = Dataset.open(tmp_path / "out")
    assert_same_as_encode(dataset, make_chats(160), chat_tokenizer, **knobs)
    assert (report.records, report.documents, report.rejects, report.dropped) == (160, 160, 0, 0)
    roles = report.chats["roles"]
    assert sum(role["trained"] for role in roles.values()) == dataset.manifest.trained_tokens
    assert sum(role["tokens"] for role in roles.values()) == dataset.manifest.tokens
    assert verify(tmp_path / "out").faults == ()
