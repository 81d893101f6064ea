"""Layouts that other tools write: segments and ids, steps with labels, queries with a history, bare
lists.
"""

import json

import numpy as np
import pytest

from makers.datasets import prepare_here
from makers.tokenizers import tiny_tokenizer
from penstock import load_tokenizer, open_dataset
from penstock.chat.encoder import encode
from penstock.chat.records.answers import read_answers
from penstock.chat.records.cleaning import clean
from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.layouts import detect_layout, read_conversation
from penstock.core.errors import ConversationError, RecordError

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SEGMENTS = [
    {"label": False, "text": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"},
    {"label": True, "text": "hello there<|im_end|>"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    words = ["hello there user assistant hi q a one two three é水 what"] * 20
    tiny_tokenizer(folder, words, 400, ["<|im_start|>", "<|im_end|>"])
    return load_tokenizer(folder)


def texts(record, **settings):
    read = read_conversation(record, LayoutSettings(**settings))
    return [(message["role"], message["content"]) for message in read.messages]


@pytest.mark.parametrize(
    ("record", "layout", "expected"),
    [
        (
            {"query": "q", "response": "a", "history": [["x", "y"]], "system": "s"},
            "prompt_completion",
            "s x y q a",
        ),
        (
            {"prompt": "q", "completion": "a", "history": [["x", "y"], ["z", "w"]]},
            "prompt_completion",
            "x y z w q a",
        ),
        ({"instruction": "q", "context": "c", "response": "a"}, "alpaca", "q\nc a"),
        ({"instruction": "q", "input": "", "context": "c", "output": "a"}, "alpaca", "q\nc a"),
        ({"messages": [U, A], "system_prompt": "s"}, "messages", "s q a"),
        (
            {
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
                "system_prompt": "s",
            },
            "sharegpt",
            "s q a",
        ),
    ],
)
def test_what_is_read(record, layout, expected):
    assert detect_layout(record) == layout
    assert " ".join(content for _, content in texts(record)) == expected


def test_calls_and_results_as_roles():
    messages = [
        U,
        {"role": "tool_call", "content": '{"name": "f", "arguments": {"x": 1}}'},
        {"role": "tool_response", "content": "1"},
        A,
    ]
    read = read_conversation({"messages": messages}).messages
    assert [message["role"] for message in read] == ["user", "assistant", "tool", "assistant"]
    assert read[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


def test_named_fields_are_one_layout_of_several():
    settings = {"fields": {"prompt": "question", "completion": "answer"}}
    assert texts({"question": "q", "answer": "a"}, **settings) == [
        ("user", "q"),
        ("assistant", "a"),
    ]
    for record in (
        {"messages": [U, A]},
        {"prompt": "q", "completion": "a"},
        {"instruction": "q", "output": "a"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ):
        assert texts(record, **settings) == [("user", "q"), ("assistant", "a")]
    # The named answer decides, whatever else there is.
    assert texts({"question": "q", "answer": "a", "messages": [U]}, **settings) == [
        ("user", "q"),
        ("assistant", "a"),
    ]


def test_steps_with_labels():
    record = {"prompt": "q", "completions": ["one", "two", "three"], "labels": [True, True, False]}
    read = read_conversation(record)
    assert detect_layout(record) == "steps"
    assert [part["text"] for part in read.messages[1]["content"]] == ["one\n", "two\n", "three"]
    assert [(one.field, one.weight) for one in read.message_weights[1].ranges] == [
        ("content.0.text", 1.0), ("content.1.text", 1.0), ("content.2.text", 0.0),
    ]  # fmt: skip
    with pytest.raises(ConversationError, match=r'"labels".*\[1\].*false.*3.*steps'):
        read_conversation({**record, "labels": [1]})
    # A list of answers with scores is another thing.
    [found] = read_answers(
        {"prompt": "q", "completions": ["a", "b"], "scores": [1, 2]},
        LayoutSettings(answers="tree"),
        "",
    )
    assert found.ranks == (1.0, 0.0)


def test_a_rejected_response_makes_a_pair():
    tree = LayoutSettings(answers="tree")
    for record in (
        {"query": "q", "response": "a", "rejected_response": "b"},
        {"messages": [U, A], "rejected_response": "b"},
        {"messages": [U, A], "rejected_messages": [U, {"role": "assistant", "content": "b"}]},
    ):
        [found] = read_answers(record, tree, "")
        assert [one.messages[-1]["content"] for one in found.conversations] == ["a", "b"]
        assert found.ranks == (0.0, 1.0)
        assert texts(record)[-1] == ("assistant", "a")


def test_segments_are_encoded_one_by_one(tokenizer):
    chat = encode({"segments": SEGMENTS}, tokenizer=tokenizer, template="none")
    expected = [tokenizer.encode(one["text"], allow_control=True).tolist() for one in SEGMENTS]
    assert chat.tokens.tolist() == [*expected[0], *expected[1]]
    assert chat.loss_weights.tolist() == [0.0] * len(expected[0]) + [1.0] * len(expected[1])
    assert chat.text == SEGMENTS[0]["text"] + SEGMENTS[1]["text"]
    assert [text for _, text in chat.trained_text] == [SEGMENTS[1]["text"]]
    assert chat.certificate.ok
    assert [bool(why) for why in chat.reasons] == [weight == 0 for weight in chat.loss_weights]


def test_token_ids_are_taken_as_they_are(tokenizer):
    ids = tokenizer.encode("what é水 one").tolist()
    labels = [-100, *ids[1:-1], -100]
    chat = encode(
        {"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)},
        tokenizer=tokenizer,
        template="none",
    )
    assert chat.tokens.tolist() == ids
    assert chat.loss_weights.tolist() == [float(label != -100) for label in labels]
    assert chat.text == "what é水 one"
    assert chat.ends[-1] == len(chat.text)
    whole = encode({"input_ids": ids}, tokenizer=tokenizer, template="none")
    assert whole.loss_weights.tolist() == [1.0] * len(ids)
    padded = encode(
        {"input_ids": [0, *ids], "attention_mask": [0] + [1] * len(ids)},
        tokenizer=tokenizer,
        template="none",
    )
    assert padded.tokens.tolist() == ids
    masked = encode(
        {"input_ids": ids, "loss_mask": [0, 0.5, *[1] * (len(ids) - 2)]},
        tokenizer=tokenizer,
        template="none",
    )
    assert masked.loss_weights[:3].tolist() == [0, 0.5, 1]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"input_ids": [1, 2], "labels": [2, -100]},
            r"label 0 is 2, and its token 1; expected the same id, not shifted",
        ),
        (
            {"input_ids": [1, 2], "labels": [1]},
            '"labels" has 1; expected one for each of 2 input_ids',
        ),
        (
            {"input_ids": [1, 2], "loss_mask": [1, -1]},
            '"loss_mask" has -1; expected numbers, 0 or more',
        ),
        (
            {"input_ids": [1, 99999]},
            "input_ids has 99999; the vocabulary .* were they made with another tokenizer",
        ),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "no token is trained: the record says so"),
        (
            {"segments": [{"label": "yes", "text": "a"}]},
            'segment 0 has "label": .yes.; expected true or false',
        ),
        (
            {"segments": [{"label": True, "text": "a"}, {"label": True}]},
            "segment 1 is .*; expected",
        ),
        ({"messages": [U, A]}, "the template is none, and this record needs one"),
    ],
)
def test_what_is_wrong_with_written_records(tokenizer, record, message):
    with pytest.raises(ConversationError, match=message):
        encode(record, tokenizer=tokenizer, template="none")


def test_written_records_that_train_nothing_are_dropped():
    read = read_conversation({"segments": [{"label": False, "text": "a"}]})
    assert clean(read)[0] is None
    assert clean(read)[1].untrained == 1


def test_written_records_become_documents(tmp_path, tokenizer):
    ids = tokenizer.encode("one two three").tolist()
    records = [
        {"segments": SEGMENTS},
        {"input_ids": ids, "labels": [-100, *ids[1:]]},
        {"messages": [U, A]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    report = prepare_here(
        tmp_path / "a.jsonl", tokenizer, tmp_path / "out", template="chatml", validation=0.0
    )
    assert report.chats["layouts"] == {"segments": 1, "tokens": 1, "messages": 1}
    first, second, _ = open_dataset(tmp_path / "out")
    assert second.tokens.tolist() == ids
    assert second.loss_weights.tolist() == [0.0, *[1.0] * (len(ids) - 1)]
    assert np.count_nonzero(first.loss_weights) == len(
        tokenizer.encode(SEGMENTS[1]["text"], allow_control=True)
    )


BARE = [
    [U, A],
    [U, {"role": "assistant", "content": "b"}],
    [{"role": "system", "content": "s"}, U, A],
]


@pytest.mark.parametrize(
    "name", ["lines.jsonl", "lines.json", "array.json", "pretty.json", "one.json", "one line.jsonl"]
)
def test_bare_lists_of_messages_are_records(tmp_path, tokenizer, name):
    lines = "\n".join(map(json.dumps, BARE))
    content = {
        "lines.jsonl": lines,
        "lines.json": lines + "\n",
        "array.json": json.dumps(BARE),
        "pretty.json": json.dumps(BARE, indent=1),
        "one.json": json.dumps(BARE[0], indent=2),
        "one line.jsonl": json.dumps(BARE[0]),
    }[name]
    (tmp_path / name).write_text(content)
    prepare_here(tmp_path / name, tokenizer, tmp_path / "out", template="chatml")
    expected = BARE[:1] if name.startswith("one") else BARE
    prepare_here(
        [{"messages": one} for one in expected], tokenizer, tmp_path / "same", template="chatml"
    )
    found, same = open_dataset(tmp_path / "out"), open_dataset(tmp_path / "same")
    assert [one.tokens.tolist() for one in found] == [one.tokens.tolist() for one in same]


def test_bare_lists_from_python_and_long_ones(tmp_path, tokenizer):
    long = [[U, {"role": "assistant", "content": "a " * 50_000}]] * 3
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, long)))
    assert (
        prepare_here(
            tmp_path / "long.jsonl", tokenizer, tmp_path / "o", template="chatml"
        ).documents
        == 3
    )
    assert prepare_here(BARE, tokenizer, tmp_path / "p", template="chatml").documents == 3
    with pytest.raises(RecordError, match=r"record.*object.*messages.*messages"):
        prepare_here([[1, 2]], tokenizer, tmp_path / "q", template="chatml")
