"""Conversations to a dataset: what is stored is what `chat.encode` says, every record is accounted
for, all is told.
"""

import itertools
import json
import shutil
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prepare_cases import contents

from makers.datasets import prepare_here
from makers.texts import make_chat, write_json_lines
from makers.tokenizers import CHATML
from penstock import Dataset, chat, load_tokenizer, prepare
from penstock.core.errors import ConfigError, OutputError, RecordError
from penstock.core.ragged import Ragged
from penstock.data.prepare import ChatSettings
from penstock.data.shards import verify
from penstock.data.shards.writing.blocks import spans_of
from penstock.data.sources import Fields

DATED = "{{ strftime_now('%Y-%m-%d') + '\n' }}" + CHATML
REWRITING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if "
    "message['role'] == 'assistant' and not loop.last %}{{ "
    "message['content'].split('</think>')[-1] }}{% else %}{{ message['content'] }}{% endif "
    "%}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)


prepare_chats = partial(prepare_here, template=CHATML)


def make_chats(count):
    return [
        make_chat(
            *(
                f"{word} {number} wheel"
                for word in ("water", "pipe", "größe 🙂", "steel")[: 2 + 2 * (number % 2)]
            )
        )
        for number in range(count)
    ]


@pytest.fixture
def chats(tmp_path):
    """A file of lines, a JSON array over several lines, Parquet, a saved dataset: 40 conversations
    each.
    """
    folder = tmp_path / "raw"
    folder.mkdir()
    records = make_chats(160)
    write_json_lines(folder / "a.jsonl", records[:40])
    (folder / "b.json").write_text(json.dumps(records[40:80], indent=1))
    pq.write_table(pa.Table.from_pylist(records[80:120]), folder / "c.parquet", row_group_size=16)
    with pa.ipc.new_stream(
        folder / "d.arrow", pa.Table.from_pylist(records[120:]).schema
    ) as stream:
        stream.write_table(pa.Table.from_pylist(records[120:]))
    return folder


def assert_same_as_encode(dataset, records, tokenizer, template=CHATML, **mask_settings):
    assert len(dataset) == len(records)
    for document, record in zip(dataset[:], records, strict=True):
        due = chat.encode(
            record,
            tokenizer=tokenizer,
            template=chat.load_template(template, tokenizer=tokenizer),
            **mask_settings,
        )
        np.testing.assert_array_equal(document.tokens, due.tokens)
        np.testing.assert_array_equal(document.loss_weights, due.loss_weights)


@pytest.mark.parametrize(
    "mask_settings", [{}, {"mask_history": True, "train_on_eos": "none"}, {"train_on_inputs": True}]
)
def test_stored_tokens_and_weights_are_those_of_encode(
    tmp_path, chats, chat_tokenizer, mask_settings
):
    report = prepare_chats(chats, chat_tokenizer, tmp_path / "out", **mask_settings)
    dataset = Dataset.open(tmp_path / "out")
    assert_same_as_encode(dataset, make_chats(160), chat_tokenizer, **mask_settings)
    assert (report.records, report.documents, report.rejects, report.dropped) == (160, 160, 0, 0)
    roles = report.chats["roles"]
    assert sum(role["trained"] for role in roles.values()) == dataset.manifest.trained_tokens
    assert sum(role["tokens"] for role in roles.values()) == dataset.manifest.tokens
    assert verify(tmp_path / "out").faults == ()


def test_the_same_bytes_for_any_number_of_processes_and_again_is_a_look(
    tmp_path, chats, chat_tokenizer
):
    options = {"part_bytes": 2000, "validation": 0.3, "keep_text": True}
    first = prepare_chats(chats, chat_tokenizer, tmp_path / "one", **options)
    prepare_chats(chats, chat_tokenizer, tmp_path / "two", processes=2, **options)
    assert first.parts > 8
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    again = prepare_chats(chats, chat_tokenizer, tmp_path / "one", **options)
    assert again.as_json(lasting=True) == first.as_json(lasting=True)
    assert "trained" in again.as_text()


def test_other_settings_are_refused(tmp_path, chats, chat_tokenizer):
    prepare_chats(chats, chat_tokenizer, tmp_path / "out")
    with pytest.raises(OutputError, match=r"chat\.mask_history was False, is True"):
        prepare_chats(chats, chat_tokenizer, tmp_path / "out", mask_history=True)
    with pytest.raises(OutputError, match=r"chat\.template was"):
        prepare_chats(chats, chat_tokenizer, tmp_path / "out", template=REWRITING)
    with pytest.raises(OutputError, match=r"chat\.allow_forged was False, is None"):
        prepare(
            chats / "a.jsonl", tokenizer=chat_tokenizer, output=tmp_path / "out", progress=False
        )


def test_bad_records_have_true_reasons_with_line_and_message(tmp_path, chat_tokenizer):
    good = json.dumps(make_chat("water", "wheel"))
    lines = [
        good,
        (
            '{"messages": [{"role": "user", "content": "water"}, {"role": "pipe", "content": '
            '"wheel"}]}'
        ),
        "{broken",
        '{"text": "no chat"}',
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", '
            '"content": "a"}]}'
        ),
        "[1, 2]",
        json.dumps(make_chat("water", "")),
        good,
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    report = prepare_chats(
        tmp_path / "chats.jsonl",
        chat_tokenizer,
        tmp_path / "out",
        on_error="skip",
        train_on_eos="none",
    )
    assert (report.records, report.documents, report.rejects) == (8, 2, 6)
    rejects = {}
    for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines():
        value = json.loads(line)
        rejects[value["line"]] = value["reason"]
    assert list(rejects) == [2, 3, 4, 5, 6, 7]
    assert rejects[2].startswith("message 1")
    assert "not JSON" in rejects[3]
    assert "no known layout" in rejects[4]
    assert "lone surrogate U+D800" in rejects[5]
    assert "list" in rejects[6]
    assert "no token is trained" in rejects[7]
    assert not any(reason.startswith(str(tmp_path)) for reason in rejects.values())
    assert report.chats["problems"]["nothing_trained"]["example"].startswith(
        f"{tmp_path / 'chats.jsonl'}:7: "
    )
    with pytest.raises(RecordError, match=r"chats.jsonl:2.*1.*set on_error"):
        prepare_chats(tmp_path / "chats.jsonl", chat_tokenizer, tmp_path / "stop")


def test_clean_up_is_counted_and_records_add_up(tmp_path, chat_tokenizer, capsys):
    records = [
        make_chat("water", "wheel"),
        make_chat("water", "wheel", "pipe"),
        make_chat("water"),
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "train": False},
            ]
        },
        make_chat(*["water wheel pipe"] * 6),
    ]
    report = prepare_chats(
        records, chat_tokenizer, tmp_path / "out", max_tokens=40, too_long="truncate"
    )
    cleaned = report.chats["cleaned"]
    assert (report.records, report.documents, report.dropped) == (5, 3, 2)
    assert (cleaned["read"], cleaned["trimmed"], cleaned["empty"], cleaned["untrained"]) == (
        5,
        1,
        1,
        1,
    )
    assert (cleaned["truncated"], cleaned["too_long"]) == (1, 0)
    assert Dataset.open(tmp_path / "out").manifest.longest <= 40
    assert "2 dropped" in report.as_text()
    assert "1 dropped: empty, or without any reply, such as <python>:2; " in report.as_text()
    assert "1 dropped: nothing to train, such as <python>:3; " in report.as_text()
    prepare_chats(
        records,
        chat_tokenizer,
        tmp_path / "loud",
        max_tokens=40,
        too_long="truncate",
        progress=True,
    )
    said = (
        "penstock: 1 conversation was dropped, because the settings train nothing in it; the "
        "first: <python>:3\n"
    )
    assert capsys.readouterr().err.count(said) == 1
    dropped = prepare_chats(
        records, chat_tokenizer, tmp_path / "drop", max_tokens=40, too_long="drop"
    )
    assert (dropped.documents, dropped.dropped, dropped.chats["cleaned"]["too_long"]) == (2, 3, 1)
    with pytest.raises(RecordError, match=r"<python>:4: .*tokens.*6.*most 40"):
        prepare_chats(records, chat_tokenizer, tmp_path / "error", max_tokens=40)


def test_a_rewritten_chat_can_become_a_document_for_each_reply(tmp_path, chat_tokenizer):
    record = make_chat("water", "a</think>wheel", "pipe", "b</think>steel")
    whole = prepare_chats([record], chat_tokenizer, tmp_path / "whole", template=REWRITING)
    assert whole.chats["problems"]["rewritten"]["conversations"] == 1
    records = [record, make_chat("water", "wheel"), record]
    split = prepare_chats(
        records,
        chat_tokenizer,
        tmp_path / "split",
        template=REWRITING,
        on_rewrite="split",
        validation=0.5,
    )
    assert (split.records, split.documents, split.more_documents, split.rejects) == (3, 5, 2, 0)
    assert (
        "cross-check: boundaries of chatml agree: 1 of 5\ncross-check: 4 not compared: "
        in split.as_text()
    )
    assert "not compared" not in whole.as_text()
    for name in split.splits:
        dataset = Dataset.open(tmp_path / "split" / name)
        lines = [document.origin.line for document in dataset[:]]
        assert all(lines.count(line) == (1 if line == 1 else 2) for line in lines)


def test_the_day_is_fixed_when_preparing_begins(tmp_path, chat_tokenizer):
    records = make_chats(4)
    prepare_chats(records, chat_tokenizer, tmp_path / "out", template=DATED, date="2020-02-03")
    assert Dataset.open(tmp_path / "out").chat.date == "2020-02-03"
    prepare_chats(records, chat_tokenizer, tmp_path / "today", template=DATED)
    plan = json.loads((tmp_path / "today/prepare.json").read_text())
    plan["settings"]["chat.date"] = "2021-01-01"
    shutil.rmtree(tmp_path / "today")
    (tmp_path / "today").mkdir()
    (tmp_path / "today/prepare.json").write_text(json.dumps(plan))
    prepare_chats(records, chat_tokenizer, tmp_path / "today", template=DATED)
    dataset = Dataset.open(tmp_path / "today")
    assert dataset.chat.date == "2021-01-01"
    assert chat_tokenizer.decode(dataset[0].tokens).startswith("2021-01-01\n")
    with pytest.raises(ConfigError, match=r"date.*day.*2026-12-31.*'3\.2\.'"):
        prepare_chats(records, chat_tokenizer, tmp_path / "no", template=DATED, date="3.2.")


def test_turns_that_cannot_end_and_empty_replies_are_told(tmp_path, chat_tokenizer):
    lines = [
        make_chat("water", "wheel", "pipe", "steel"),
        make_chat("water", "wheel"),
        make_chat("water", ""),
    ]
    write_json_lines(tmp_path / "some.jsonl", lines)
    bare = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% "
        "endfor %}"
    )
    report = prepare_chats(
        tmp_path / "some.jsonl",
        chat_tokenizer,
        tmp_path / "out",
        template=bare,
        on_missing_terminator="append",
    )
    problems = report.chats["problems"]
    assert problems["unterminated"]["conversations"] == 1
    assert (
        "some.jsonl:1: message 1: the template ends the turn without"
        in problems["unterminated"]["example"]
    )
    assert problems["empty_reply"]["conversations"] == 1
    text = report.as_text()
    assert (
        "1 conversation kept: a trained turn has no terminator (unterminated); the first: " in text
    )
    assert "1 conversation kept: a trained reply says nothing (empty_reply); the first: " in text
    [eos] = [
        text
        for text, token_id in chat_tokenizer.special_tokens.items()
        if token_id == chat_tokenizer.eos_id
    ]
    assert report.chats["terminators"] == {eos: {"seen": 3, "trained": 3, "is_control": True}}


def test_a_terminator_that_swallows_the_line_end_is_a_control_token(tmp_path, chat_tokenizer):
    """As Phi-3's <|end|>, whose entry has rstrip."""
    chat_tokenizer.save(tmp_path / "strips")
    path = tmp_path / "strips/tokenizer.json"
    parsed = json.loads(path.read_text())
    for token in parsed["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
    path.write_text(json.dumps(parsed))
    report = prepare_chats(
        [make_chat("water", "wheel")], load_tokenizer(tmp_path / "strips"), tmp_path / "out"
    )
    assert report.chats["terminators"] == {
        "<|im_end|>\n": {"seen": 2, "trained": 1, "is_control": True}
    }
    assert "plain text" not in report.as_text()
    chatted = chat.encode(
        make_chat("water", "wheel"), tokenizer=tmp_path / "strips", template=CHATML
    )
    assert "ends trained: <|im_end|>⏎ of message 1\n" in str(chatted.certificate)


def test_a_dataset_ships_its_template_and_stop_ids(tmp_path, chat_tokenizer):
    prepare_chats(make_chats(3), chat_tokenizer, tmp_path / "out", mask_history=True)
    dataset = Dataset.open(tmp_path / "out")
    names = chat_tokenizer.special_tokens
    assert dataset.chat.template == CHATML
    assert dataset.chat.stop_texts == ("<|im_end|>",)
    assert dataset.chat.stop_ids == tuple(sorted({names["<|im_end|>"], chat_tokenizer.eos_id}))
    assert dataset.chat.settings["mask_settings"]["mask_history"] is True
    assert (tmp_path / "out/tokenizer/chat_template.jinja").read_text() == CHATML
    assert chat.load_template(tmp_path / "out/tokenizer").source == CHATML
    text = (tmp_path / "out/chat.json").read_text()
    (tmp_path / "out/chat.json").write_text(
        text.replace('"mask_history": true', '"mask_history": false')
    )
    assert "chat.json" in verify(tmp_path / "out").faults[0].file


def test_settings_as_an_object_and_as_keywords_come_to_the_same(tmp_path, chat_tokenizer):
    layout = chat.LayoutSettings(fields={"prompt": "question", "completion": "answer"})
    settings = ChatSettings(layout=layout, mask_settings=chat.MaskSettings(train_on_eos="none"))
    records = [{"question": "water", "answer": "wheel"}]
    prepare_chats(records, chat_tokenizer, tmp_path / "out", chat=settings)
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.chat.template == CHATML
    assert_same_as_encode(
        dataset, [make_chat("water", "wheel")], chat_tokenizer, train_on_eos="none"
    )
    prepare_chats(records, chat_tokenizer, tmp_path / "two", chat=settings, train_on_eos="turn")
    assert_same_as_encode(
        Dataset.open(tmp_path / "two"), [make_chat("water", "wheel")], chat_tokenizer
    )
    texts = iter([{"body": "water"}])
    prepare(
        texts,
        tokenizer=chat_tokenizer,
        output=tmp_path / "text",
        fields=Fields(text="body"),
        progress=False,
    )


def test_a_template_of_another_model_is_told(tmp_path, chat_tokenizer):
    other = CHATML.replace("<|im_end|>", "<end_of_turn>")
    with pytest.raises(RecordError, match=r"terminator.*'<end_of_turn>'.*tokenizer"):
        prepare_chats(make_chats(2), chat_tokenizer, tmp_path / "out", template=other)
    report = prepare_chats(
        make_chats(2),
        chat_tokenizer,
        tmp_path / "two",
        template=other,
        on_missing_terminator="allow",
    )
    assert (
        "plain text, because this tokenizer has no such control token: '<end_of_turn>'"
        in report.as_text()
    )


def test_a_role_that_nobody_has_is_named(tmp_path, chat_tokenizer):
    with pytest.raises(ConfigError, match="'assitant' is no known role"):
        prepare_chats(make_chats(2), chat_tokenizer, tmp_path / "out", roles_to_train=("assitant",))
    with pytest.raises(RecordError, match="none has a reply that is trained"):
        prepare_chats(make_chats(2), chat_tokenizer, tmp_path / "out", roles_to_train=("tool",))


def test_mistakes_are_refused(tmp_path, chat_tokenizer):
    with pytest.raises(ConfigError, match=r"mask_history.*chats.*template"):
        prepare(["a"], tokenizer=chat_tokenizer, output=tmp_path / "out", mask_history=True)
    with pytest.raises(ConfigError, match="add_bos is for texts"):
        prepare_chats([make_chat("a", "b")], chat_tokenizer, tmp_path / "out", add_bos="no")
    with pytest.raises(ConfigError, match="text_field, weights_field"):
        prepare_chats([make_chat("a", "b")], chat_tokenizer, tmp_path / "out", text_field="body")
    with pytest.raises(ConfigError, match="has no chat template of its own"):
        prepare_chats([make_chat("a", "b")], chat_tokenizer, tmp_path / "out", template="auto")
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ConfigError, match="plain text holds no conversations"):
        prepare_chats(tmp_path / "a.txt", chat_tokenizer, tmp_path / "out")


def test_transforms_see_whole_records(tmp_path, chat_tokenizer):
    def change(record):
        return {"messages": record["chat"]} if record["keep"] else None

    records = [
        {"chat": one["messages"], "keep": number != 1} for number, one in enumerate(make_chats(3))
    ]
    report = prepare_chats(records, chat_tokenizer, tmp_path / "out", transform=change)
    assert (report.records, report.documents, report.filtered) == (3, 2, 1)
    assert_same_as_encode(
        Dataset.open(tmp_path / "out"), [make_chats(3)[0], make_chats(3)[2]], chat_tokenizer
    )


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=6), max_size=6))
def test_spans_spell_the_weights(rows):
    block = spans_of(Ragged.from_rows(rows, np.float32))
    assert block.valid.all()
    for row, spans in zip(rows, block.spans, strict=True):
        spelled = [0.0] * len(row)
        for begin, end, weight in spans.tolist():
            assert weight != 0
            spelled[begin:end] = [weight] * (end - begin)
        assert spelled == row
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans.tolist()))


def test_the_split_goes_by_the_conversation_alone(tmp_path, chats, chat_tokenizer):
    prepare_chats(chats, chat_tokenizer, tmp_path / "one", validation=0.3)
    prepare_chats(
        chats,
        chat_tokenizer,
        tmp_path / "two",
        template=REWRITING,
        validation=0.3,
        max_tokens=45,
        too_long="truncate",
    )
    one, two = (
        {
            (document.origin.file, document.origin.line)
            for document in Dataset.open(tmp_path / name / "validation")[:]
        }
        for name in ("one", "two")
    )
    assert one == two
    assert 20 < len(one) < 80
