"""Raw conversations as prepare would make them: what is sampled, what is refused and why, the page,
the terminal.
"""

import json

import numpy as np
import pytest

from makers.datasets import prepare_here
from makers.texts import make_chat
from makers.tokenizers import CHAT_CONTROLS, CHATML, tiny_tokenizer
from makers.views import console_of, printed
from penstock import open_dataset
from penstock.chat import family
from penstock.chat.records.cleaning import CleaningSettings
from penstock.core.errors import ConfigError, RecordError
from penstock.data.prepare import ChatSettings
from penstock.use.inspection import Style
from penstock.use.inspection.conversation_views import (
    conversations_as_json,
    conversations_view,
    page_of_conversations,
    spread,
    summary_of,
)
from penstock.use.inspection.conversations import sample_records, show_conversations
from penstock.use.inspection.page import page_html
from penstock.use.inspection.pages import pages_of, with_turns

SETTINGS = ChatSettings(template=CHATML)


def record(question="How high is the water?", *answers):
    contents = [question]
    for answer in answers or ("Three metres.",):
        contents += [answer, "And now?"]
    return make_chat(*contents[:-1])


def write(path, *records):
    path.write_text(
        "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in records)
    )
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(
        tmp_path_factory.mktemp("tokenizer"), [json.dumps(record())], 300, CHAT_CONTROLS
    )


# -- samples
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 99, 100, 500])
def test_samples_are_spread_over_the_whole_input(tmp_path, count):
    source = write(
        tmp_path / "chats.jsonl", *(record(f"question {number}") for number in range(100))
    )
    sample = sample_records(source, count)
    assert sample.total == 100
    assert len(sample.records) == min(count, 100)
    assert [each.value["messages"][0]["content"] for each in sample.records] == [
        f"question {each.number}" for each in sample.records
    ]
    assert [each.origin for each in sample.records] == [
        f"{source}:{each.number + 1}" for each in sample.records
    ]
    gaps = np.diff([each.number for each in sample.records] + [100])
    assert gaps.max() <= 2 * max(1, 100 / count)


def test_records_that_cannot_be_read_keep_their_place(tmp_path):
    source = write(tmp_path / "chats.jsonl", record("a"), "{not json", "", record("b"), "[1]")
    sample = sample_records(source, 10)
    assert [
        (each.number, each.origin.rpartition(":")[2], each.value is None) for each in sample.records
    ] == [
        (0, "1", False),
        (1, "2", True),
        (2, "4", False),
        (3, "5", True),
    ]
    assert "not JSON" in sample.records[1].problem
    assert sample.records[1].excerpt == "{not json"


def test_records_are_named_by_their_number(tmp_path):
    source = write(tmp_path / "chats.jsonl", *(record(f"question {number}") for number in range(9)))
    assert [each.number for each in sample_records(source, 0, numbers=[2, 7]).records] == [2, 7]
    with pytest.raises(ConfigError, match=r"record.*9.*input.*9.*numbered.*0"):
        sample_records(source, 0, numbers=[9])


def test_a_json_array_is_read(tmp_path):
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([record("a"), record("b")], indent=1))
    assert sample_records(str(path), 10).total == 2


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RecordError, match=r"none\.jsonl: no such file"):
        sample_records(str(tmp_path / "none.jsonl"), 10)


@pytest.mark.parametrize(("count", "total"), [(0, 5), (3, 0), (3, 10), (10, 3), (5, 5)])
def test_spread(count, total):
    numbers = spread(count, total)
    assert len(numbers) == min(count, total)
    assert numbers == sorted({number for number in numbers if 0 <= number < total})


# -- conversations
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path, tokenizer):
    """One of each: good, trailing question, nobody answers, no layout, unknown role, not JSON,
    empty answer.
    """
    trailing = record("q", "An answer.")
    trailing["messages"].append({"role": "user", "content": "Thanks"})
    source = write(
        tmp_path / "chats.jsonl",
        record("q", "One.", "Two."),
        trailing,
        {"messages": [{"role": "user", "content": "Anybody?"}]},
        {"text": "no conversation"},
        {"messages": [{"role": "gpt5", "content": "hm"}]},
        "{not json",
    )
    return sample_records(source, 100)


def kinds(document):
    return [note[0] for note in document.notes]


def test_what_is_refused_is_shown_with_its_reason(mixed, tokenizer):
    shown = show_conversations(mixed, tokenizer, SETTINGS)
    documents = shown.flat
    assert [document.ok for document in documents] == [True, True, False, False, False, False]
    assert [kinds(document) for document in documents] == [
        [], ["trimmed"], ["left out"], ["refused"], ["refused"], ["refused"],
    ]  # fmt: skip
    assert shown.refused == documents[3:]
    reasons = [document.notes[0][1] for document in documents[3:]]
    assert "no known layout" in reasons[0]
    assert 'role "gpt5"' in reasons[1]
    assert "not JSON" in reasons[2]
    assert not any(reason.startswith("/") for reason in reasons)
    assert all(document.trained == 0 for document in documents[2:])
    assert "".join(documents[2].pieces) == "Anybody?\n"
    assert "gpt5" in "".join(documents[4].pieces)
    assert "".join(documents[5].pieces) == "{not json"


def test_tokens_are_those_that_prepare_writes(mixed, tokenizer, tmp_path):
    prepare_here(
        mixed.records[0].origin.rpartition(":")[0],
        tokenizer,
        tmp_path / "out",
        template=CHATML,
        on_error="skip",
    )
    dataset = open_dataset(tmp_path / "out")
    documents = [
        document for document in show_conversations(mixed, tokenizer, SETTINGS).flat if document.ok
    ]
    assert len(dataset) == len(documents) == 2
    for stored, shown in zip(dataset, documents, strict=True):
        assert stored.tokens.tolist() == shown.ids.tolist()
        assert stored.loss_weights.tolist() == shown.loss_weights.tolist()
        assert f"{stored.origin.file}:{stored.origin.line}" == shown.origin


def test_too_long_conversations_are_told(tmp_path, tokenizer):
    sample = sample_records(write(tmp_path / "c.jsonl", record("q", "One.", "word " * 60)), 10)

    def notes(**cleaning):
        chat = ChatSettings(template=CHATML, cleaning=CleaningSettings(max_tokens=80, **cleaning))
        [document] = show_conversations(sample, tokenizer, chat).flat
        return document.notes

    assert notes(too_long="truncate")[0] == ("truncated", "2 messages at the end: too long")
    assert notes(too_long="drop")[0] == ("left out", "longer than 80 tokens")
    assert notes(too_long="error")[0][0] == "refused"


def test_figures_add_up(mixed, tokenizer):
    shown = show_conversations(mixed, tokenizer, SETTINGS)
    summary = summary_of(shown)
    trained = sum(document.trained for document in shown.flat)
    assert summary["conversations"] == "6"
    assert summary["proven"] == "2"
    assert summary["refused"] == "3"
    assert summary["note: trimmed"] == summary["note: left out"] == "1"
    assert summary["trained"].startswith(f"{trained:,} (")
    assert 'messages, because "messages" holds messages' in summary["layout"]
    found = conversations_as_json(shown)
    assert [each["origin"].rpartition(":")[2] for each in found["refused"]] == ["4", "5", "6"]
    assert json.loads(json.dumps(found)) == found


def test_a_comparison_names_what_differs_and_pairs_what_has_no_partner(mixed, tokenizer):
    left = show_conversations(mixed, tokenizer, SETTINGS)
    last = show_conversations(
        mixed, tokenizer, SETTINGS.merge({"mask_history": True, "train_on_eos": "none"})
    )
    page = page_of_conversations("chats", left, last)
    assert (page.label, page.other.label) == ("as set", "changed")
    one = page_of_conversations(
        "chats", left, show_conversations(mixed, tokenizer, SETTINGS.merge({"mask_history": True}))
    )
    assert (one.label, one.other.label) == ("mask_history=no", "mask_history=yes")
    assert page.other.documents[0].trained < page.documents[0].trained
    fewer = show_conversations(mixed, tokenizer, SETTINGS)
    object.__setattr__(fewer, "documents", ((), *fewer.documents[1:]))
    page = page_of_conversations("chats", left, fewer)
    assert kinds(page.other.documents[0]) == ["absent"]
    assert sum(page.histograms["tokens of a document"].counts) == 2
    assert "absent" in page_html(page)


def test_the_page_holds_all_of_it(mixed, tokenizer):
    text = page_html(page_of_conversations("chats", show_conversations(mixed, tokenizer, SETTINGS)))
    for part in ("no known layout", "trimmed", "mask_history", "boundaries of chatml agree"):
        assert part in text


def test_the_terminal_shows_conversations_figures_and_reasons(mixed, tokenizer):
    shown = show_conversations(mixed, tokenizer, SETTINGS)
    other = show_conversations(mixed, tokenizer, SETTINGS.merge({"mask_history": True}))
    found = printed(conversations_view(shown, Style(console_of()), 6, 500, other))
    assert "── mask_history=no" in found
    assert "── mask_history=yes" in found
    assert found.count("▌ assistant") == 2 + 2 + 1
    assert found.count("── the same under both") == 5
    assert "▌ template" not in found
    assert "chats.jsonl:4: no known layout" in " ".join(found.split())
    assert "tokenizer" in found


def test_the_terminal_counts_why_tokens_are_not_trained(tmp_path, tokenizer):
    source = write(tmp_path / "c.jsonl", record("q", "One.", "Two."))
    shown = show_conversations(
        sample_records(source, 1), tokenizer, SETTINGS.merge({"mask_history": True})
    )
    [document] = shown.flat
    lines = printed(conversations_view(shown, Style(console_of()), 1, 500)).splitlines()
    told = [
        line.removeprefix("not trained:").split(maxsplit=1)
        for line in lines
        if line.startswith("not trained:")
    ]
    counts, reasons = [int(count) for count, _ in told], [reason.strip() for _, reason in told]
    assert sum(counts) == len(document.ids) - document.trained
    assert counts == sorted(counts, reverse=True)
    assert "role user is not in roles_to_train" in reasons
    assert any(
        reason.startswith("an earlier reply, and only the last one is trained")
        for reason in reasons
    )


def test_equal_reasons_are_told_once(tmp_path, tokenizer):
    sample = sample_records(write(tmp_path / "c.jsonl", *[{"text": "x"}] * 7), 10)
    shown = show_conversations(sample, tokenizer, SETTINGS)
    found = printed(conversations_view(shown, Style(console_of(300)), 0, 500), width=300)
    assert "c.jsonl:1 and 6 more: no known layout" in found


# -- datasets
# --------------------------------------------------------------------------------------------------


def test_a_dataset_of_chats_shows_turns(tmp_path, tokenizer):
    source = write(tmp_path / "c.jsonl", record("q", "One.", "Two."), record())
    prepare_here(source, tokenizer, tmp_path / "out", template=CHATML)
    told = pages_of(open_dataset(tmp_path / "out"), [0, 1], tokenizer)
    proven = show_conversations(sample_records(source, 2), tokenizer, SETTINGS).flat
    for document, due in zip(told, proven, strict=True):
        names = [document.role_names[role] for role in document.roles]
        assert names == [due.role_names[role] for role in due.roles]
        assert np.diff(document.turns).tolist() == np.diff(due.turns).tolist()
        assert document.loss_weights.tolist() == due.loss_weights.tolist()


def test_neighbours_of_one_role_are_two_turns(tokenizer, tmp_path):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    sample = sample_records(write(tmp_path / "c.jsonl", {"messages": messages}), 1)
    [document] = show_conversations(sample, tokenizer, SETTINGS).flat
    found = with_turns(document, family("chatml").resolve(tokenizer))
    assert len(set(found.turns.tolist())) == 3
