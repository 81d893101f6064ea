"""The demo's conversations: the same each time, of all three kinds, and every one proven with the
demo's template.
"""

import importlib.util
from pathlib import Path

import pytest

from makers.tokenizers import tiny_tokenizer
from penstock.chat import ChatEncoder, load_template, read_conversation

EXAMPLES = Path(__file__).parents[1] / "examples"
SOURCE = "\n".join(
    f'''
def gate_{number}(water, height=3):
    """Open gate {number} and let the water through.

    Not part of the answer.
    """

class Dam_{number}:
    def close(self):
        """Close the dam number {number} until further notice."""

    def _hidden(self):
        """Nobody is asked about what is private."""
'''
    for number in range(20)
)


@pytest.fixture(scope="module")
def chats():
    spec = importlib.util.spec_from_file_location("demo_chats", EXAMPLES / "demo_chats.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def records(chats):
    return list(chats.conversations([("water", SOURCE)]))


def test_every_public_function_and_method_is_asked_about_once(chats, records):
    assert records == list(chats.conversations([("water", SOURCE)]))
    assert len(records) == 40
    said = str(records)
    assert "water.gate_7" in said
    assert "water.Dam_7.close" in said
    assert "Not part of the answer" not in said
    assert "_hidden" not in said


def test_conversations_are_of_three_kinds(records):
    assert {tuple(message["role"] for message in record["messages"]) for record in records} == {
        ("user", "assistant"),
        ("user", "assistant", "user", "assistant"),
        ("user", "assistant", "tool", "assistant"),
    }


def test_all_are_proven_and_only_the_assistant_is_trained(chats, records, tmp_path):
    texts = [message["content"] for record in records for message in record["messages"]]
    tokenizer = tiny_tokenizer(tmp_path, texts, 400, chats.CONTROL_TOKENS)
    encoder = ChatEncoder(tokenizer, load_template(EXAMPLES / "chat.jinja", tokenizer=tokenizer))
    for record in records:
        [chat] = encoder.encode(read_conversation(record))
        assert chat.certificate.problems == ()
        assert chat.certificate.checks == ("boundaries of chatml agree",)
        trained = [text for _, text in chat.trained_text]
        said = [
            message["content"] for message in record["messages"] if message["role"] == "assistant"
        ]
        assert all(text.endswith("<|im_end|>") for text in trained)
        assert [text for text in said if text] == [
            text.removesuffix("<|im_end|>") for text in trained if not text.startswith("<call>")
        ]
        assert [text for text in trained if text.startswith("<call>")] == [
            f'<call>look_up {{"name": "{call["function"]["arguments"]["name"]}"}}</call><|im_end|>'
            for message in record["messages"]
            for call in message.get("tool_calls", [])
        ]
    listed = "You may call:\nlook_up: The documentation of a function.\n<|im_end|>\n"
    tooled = next(record for record in records if "tools" in record)
    assert listed in encoder.encode(read_conversation(tooled))[0].text
