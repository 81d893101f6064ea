"""Every record of the real chats is read, or refused for the reason that is true of it."""

import json
from collections import Counter

import pytest

from penstock.chat.records.cleaning import Counts, clean
from penstock.chat.records.conversation import Conversation
from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.layouts import describe_layout, detect_layout, read_conversation
from penstock.chat.render.forms import normalise
from penstock.core.errors import ConversationError

pytestmark = pytest.mark.real_data

READ = {
    "axolotl_fixtures/alpaca.json": ("alpaca", 2),
    "axolotl_fixtures/conversation.json": ("sharegpt", 1),
    "axolotl_fixtures/conversation.missingturns.json": ("sharegpt", 1),
    "axolotl_fixtures/conversation.tokenized_llama2chat.json": ("tokens", 1),
    "fastchat/dummy_conversation.json": ("sharegpt", 500),
    "llamafactory/glaive_toolcall_en_demo.json": ("sharegpt", 300),
    "llamafactory/glaive_toolcall_zh_demo.json": ("sharegpt", 300),
    "llamafactory/identity.json": ("alpaca", 91),
    "llamafactory/reason_tool_use_demo_50.jsonl": ("messages", 50),
    "llamafactory/v1_sft_demo.jsonl": ("messages", 500),
    "maxtext_dpo/dpo_2_column_dataset.json": ("preference", 22),
    "maxtext_dpo/dpo_3_column_dataset.json": ("preference", 22),
    "oasst/en_100_message.jsonl": ("oasst", 100),
    "oasst/en_100_tree.jsonl": ("oasst", 100),
}
REFUSED = {
    "fastchat/mt_bench_question.jsonl": r"no known layout \(its fields: question_id, category, turns",  # noqa: E501
    "fastchat/mt_bench_reference_gpt4.jsonl": r"no known layout \(its fields: question_id, answer_id, .* choices",  # noqa: E501
}
FINAL_ROLES = {"system", "user", "assistant", "tool"}


def load(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    value = json.loads(text)
    return value if isinstance(value, list) else [value]


def read(record, **settings):
    found = read_conversation(record, LayoutSettings(**settings), "real")
    return found if isinstance(found, list) else [found]


def test_no_file_is_forgotten(real_data):
    files = {str(path.relative_to(real_data / "chat")) for path in (real_data / "chat").glob("*/*")}
    assert files == READ.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", READ)
def test_every_record_is_read(real_data, name):
    layout, number = READ[name]
    records = load(real_data / "chat" / name)
    assert len(records) == number
    total = Counts()
    for record in records:
        assert detect_layout(record) == layout
        for conversation in read(record):
            assert isinstance(conversation, Conversation)
            assert {message["role"] for message in conversation.messages} <= FINAL_ROLES
            assert all(
                isinstance(message["content"], str) for message in normalise(conversation).messages
            )
            total += clean(conversation)[1]
    assert total.read == number
    assert total.kept + total.dropped == number
    assert total.kept >= 0.9 * number
    assert describe_layout(records[0]).startswith(f"layout {layout}, because ")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_conversation_is_refused(real_data, name):
    for record in load(real_data / "chat" / name):
        with pytest.raises(ConversationError, match=REFUSED[name]):
            read(record)


def strings(value):
    """All strings within a decoded record, those inside JSON texts too."""
    if isinstance(value, str):
        yield value
        try:
            inner = json.loads(value)
        except ValueError:
            return
        if isinstance(inner, dict | list):
            yield from strings(inner)
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


@pytest.mark.parametrize(
    "name", [name for name, (layout, _) in READ.items() if layout in ("sharegpt", "messages")]
)
def test_no_text_is_lost_or_added(real_data, name):
    for record in load(real_data / "chat" / name):
        (conversation,) = read(record)
        turns = record.get("messages") or record["conversations"]
        assert len(conversation.messages) == len(turns)
        told = set(strings(conversation.messages))
        for turn in turns:
            content = turn.get("content", turn.get("value"))
            for text in (
                [part["value"] for part in content] if isinstance(content, list) else [content]
            ):
                is_call = turn.get("from") == "function_call" or '"arguments"' in text
                assert text in told or (is_call and set(strings(json.loads(text))) <= told)


def test_tool_calls_of_the_real_sets(real_data):
    seen = Counter()
    for name in (
        "glaive_toolcall_en_demo.json",
        "glaive_toolcall_zh_demo.json",
        "reason_tool_use_demo_50.jsonl",
    ):
        for record in load(real_data / "chat" / "llamafactory" / name):
            (conversation,) = read(record)
            for message in conversation.messages:
                for call in message.get("tool_calls", ()):
                    assert isinstance(call["function"]["arguments"], dict)
                    seen[name] += 1
            for tool in conversation.tools or ():
                assert isinstance(tool["function"]["parameters"], dict)
    assert seen["glaive_toolcall_en_demo.json"] == 211
    assert seen["glaive_toolcall_zh_demo.json"] >= 216
    assert seen["reason_tool_use_demo_50.jsonl"] >= 68


def test_loss_weights_become_marks(real_data):
    (conversation,) = read(load(real_data / "chat" / "llamafactory" / "v1_sft_demo.jsonl")[0])
    assert [weights.weight for weights in conversation.message_weights] == [0.0, 1.0]


def test_both_forms_of_the_trees_agree(real_data):
    folder = real_data / "chat" / "oasst"
    for which in ("best", "all"):
        for tree, message in zip(
            load(folder / "en_100_tree.jsonl"), load(folder / "en_100_message.jsonl"), strict=True
        ):
            found = [one.messages for one in read(tree, oasst_paths=which)]
            assert found == [one.messages for one in read(message, oasst_paths=which)]
            assert len(set(map(str, found))) == len(found)
