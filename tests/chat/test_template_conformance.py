"""Masks of 58 templates that models ship, against masks found by plain renders alone
(`slow_masks.py`).

Where the slow method works, both must be equal, token by token. Where it does not, because a
template writes earlier turns otherwise or opens them otherwise than it prompts, the certificate
must say so, and what is trained must still be the assistant's words and nobody else's.
"""

import json
import re
from collections import Counter
from functools import cache
from random import Random

import numpy as np
import pytest
from chat_makers import (
    CONVERSATIONS,
    TOKENS,
    TOOLS,
    call,
    make_tokenizer,
    markers_of,
    result,
    with_tools,
)
from slow_masks import slow_spans, slow_tokens, with_next_control

from penstock import load_tokenizer
from penstock.chat.encoder import ChatEncoder
from penstock.chat.masks.certificate import ERRORS
from penstock.chat.masks.mask_settings import MaskSettings
from penstock.chat.records.layouts import read_conversation
from penstock.chat.render.choosing import render_form
from penstock.chat.render.template import Template
from penstock.core.errors import ConversationError, RecordError

pytestmark = pytest.mark.real_data

STOPS_WITH_THE_NEXT_TURN = {"GLM-4.6", "template_baichuan"}
ENDS_IN_BLANK_LINES = {"llama-cpp-rwkv-world"}
"""It trims words and ends turns with an empty line, so plain renders cannot tell whose whitespace
it is.
"""
TELLING = {"rewritten", "context_differs", "opening_differs", "not_written", "dropped"}
TEMPLATES = 58


def templates(real_data):
    return sorted(real_data.joinpath("chat_templates").glob("*/*.jinja"))


@cache
def encoder(path, folder):
    template = Template(source=path.read_text(encoding="utf-8"), name=path.stem, variables=TOKENS)
    # One of the conversations has replies that spell markers; the slow method knows them as text.
    return ChatEncoder(
        make_tokenizer(folder, markers_of(template.source)),
        template,
        MaskSettings(trained_control_text="as_text"),
    )


def words_of(messages) -> set[str]:
    """Words of four letters and more that the messages say."""
    contents = [message["content"] for message in messages]
    said = [
        content if isinstance(content, str) else " ".join(part["text"] for part in content)
        for content in contents
    ]
    return set(re.findall(r"[^\W\d_]{4,}", " ".join(said)))


def judge(encoder: ChatEncoder, name: str, messages, tools, *, words=True) -> str:
    """What came of one conversation; fails where it is wrong. `words`: no two messages share
    any.
    """
    template = encoder.template
    conversation = read_conversation({"messages": messages, **({"tools": tools} if tools else {})})
    try:
        [chat] = encoder.encode(conversation)
    except ConversationError:
        with pytest.raises(RecordError, match=r"refuses|fails"):
            template.render_plain(conversation.messages, tools=conversation.tools)
        return "refused"
    conversation, _ = render_form(conversation, template)
    problems = chat.certificate.problems
    if words:
        check_reasons(chat, conversation)
        check_words(chat, conversation)
    slow = slow_spans(template, conversation.messages, conversation.tools)
    trained = chat.loss_weights != 0
    if not slow.failures:
        spans = (
            with_next_control(chat, slow.spans)
            if template.name in STOPS_WITH_THE_NEXT_TURN
            else slow.spans
        )
        different = np.flatnonzero(slow_tokens(chat, spans) != trained).tolist()
        if template.name in ENDS_IN_BLANK_LINES:
            different = [
                token
                for token in different
                if chat.text[chat.begins[token] : chat.ends[token]].strip()
            ]
        assert not different, (template.name, name, chat.trained_text, slow.spans)
        kinds = {problem.kind for problem in problems}
        assert not kinds & {"rewritten", "context_differs", "foreign_text", "untraced"}, (
            template.name,
            name,
            kinds,
        )
        return "proven" if chat.certificate.ok else "proven, with errors"
    told = {problem.message for problem in problems if problem.kind in TELLING}
    if words:
        # A system message or tools that are left out are left out of the contexts of all later
        # turns.
        for message in slow.failures:
            assert min([*told, 99]) <= message or message in told, (
                template.name,
                name,
                slow.failures,
                problems,
            )
    return "told" if chat.certificate.ok else "told, with errors"


def check_reasons(chat, conversation):
    """Each error is true, found by looking at text and weights only."""
    texts = [chat.text[begin:end] for begin, end in zip(chat.begins, chat.ends, strict=True)]
    for problem in chat.certificate.problems:
        assert problem.text
        if problem.kind == "missing_terminator":
            turn = [
                token for token, message in enumerate(chat.messages) if message == problem.message
            ]
            assert not any(
                chat.is_control[token] and texts[token] in ("</s>", "<|im_end|>")
                for token in turn[-1:]
            )
        elif problem.kind == "not_written" and not re.search(
            "tool calls|call [0-9]|result", problem.text
        ):
            assert str(conversation.messages[problem.message]["content"]).strip() not in chat.text
        elif problem.kind == "forged":
            at, control = next(
                found for found in chat.certificate.forged if repr(found[1]) in problem.text
            )
            assert chat.text.startswith(control, at)
            assert any(
                control in json.dumps(message, ensure_ascii=False)
                for message in conversation.messages
            )
        elif problem.kind == "nothing_trained":
            assert not chat.loss_weights[1:].any()


def check_words(chat, conversation, *, only=None):
    """No word of anybody else is trained; every word of the assistant (or of `only` one reply) is,
    if it is written.
    """
    trained = "".join(text for _, text in chat.trained_text)
    own = [m for m in conversation.messages if m["role"] == "assistant"]
    others = [m for m in conversation.messages if m["role"] != "assistant"]
    theirs = words_of(others) - words_of(own)
    assert not {
        word for word in theirs if word in trained and not trained_marker(word, chat.text)
    }, (theirs, trained)
    dropped = {part.message for part in chat.certificate.dropped if not part.is_blank}
    for place, message in enumerate(conversation.messages):
        if message["role"] == "assistant" and place not in dropped and only in (None, place):
            missing = {word for word in words_of([message]) if word not in trained}
            assert not missing, (missing, trained)


def trained_marker(word, text) -> bool:
    """Words of the markers that a template writes itself, such as im_end."""
    return f"|{word}|" in text


@pytest.mark.parametrize("place", range(TEMPLATES))
def test_masks_equal_the_slow_method(real_data, folder, place):
    path = templates(real_data)[place]
    for case, messages in CONVERSATIONS.items():
        judge(encoder(path, folder), case, messages, with_tools(case))


def test_split_documents_begin_as_they_are_prompted(real_data, folder):
    """Of every template and conversation."""
    found = Counter()
    for path in templates(real_data):
        whole = encoder(path, folder)
        for case, messages in CONVERSATIONS.items():
            conversation = read_conversation({"messages": messages, "tools": with_tools(case)})
            split = ChatEncoder(
                whole.tokenizer,
                whole.template,
                MaskSettings(on_rewrite="split", trained_control_text="as_text"),
            )
            try:
                chats = split.encode(conversation)
            except ConversationError:
                continue
            replies = [
                place for place, message in enumerate(messages) if message["role"] == "assistant"
            ]
            if len(chats) < len(replies):
                continue
            for chat, place in zip(chats, replies, strict=True):
                conversation, _ = render_form(conversation, whole.template)
                told = {problem.kind for problem in chat.certificate.problems}
                assert not told & {"rewritten", "context_differs"}, (path.stem, case)
                if (
                    told & {"opening_differs", "not_written"}
                    or "add_generation_prompt" not in whole.template.source
                ):
                    continue
                prompt = whole.template.render_plain(
                    conversation.messages[:place],
                    tools=conversation.tools,
                    add_generation_prompt=True,
                )
                begin = int(chat.begins[np.flatnonzero(chat.loss_weights)[0]])
                assert chat.text[:begin] in (prompt, prompt.rstrip()), (path.stem, case, place)
                check_words(chat, conversation.head(place + 1), only=place)
                found["split"] += 1
    assert found["split"] > 150, found


def test_most_masks_are_proven(real_data, folder):
    """So that nothing is skipped silently."""
    found = Counter()
    paths = templates(real_data)
    assert len(paths) == TEMPLATES
    for path in paths:
        for case, messages in CONVERSATIONS.items():
            found[judge(encoder(path, folder), case, messages, with_tools(case))] += 1
    assert sum(found.values()) == TEMPLATES * len(CONVERSATIONS)
    assert found["proven"] >= 635, found
    assert found["proven"] + found["proven, with errors"] >= 765, found
    assert found["told"] >= 190, found
    assert found["refused"] <= 65, found
    assert found["told, with errors"] <= 20, found


STUFF = [
    "a",
    "hello",
    " ",
    "\n",
    "\n\n",
    "  ",
    "\t",
    "<|im_end|>",
    "</s>",
    "[INST]",
    "<|end|>",
    "é",
    "水",
    "😀",
    "<think>",
    "</think>",
    "assistant\n",
    "user",
    ":",
    "{",
    "}}",
    '"',
    "\\",
    "'",
    "&",
    "<",
    "1",
    "</tool_call>",
    "\r\n",
    "[[",
]


def random_conversation(random: Random) -> list[dict]:
    """Contents of markers, tags, whitespace and brackets, with tool calls and reasoning here and
    there.
    """

    def content() -> str:
        return "".join(random.choice(STUFF) for _ in range(random.choice([0, 1, 1, 2, 3, 5, 8])))

    messages = []
    if random.random() < 0.3:
        messages.append({"role": "system", "content": "s" + content()})
    for _ in range(random.choice([1, 1, 2, 3])):
        messages.append({"role": "user", "content": content()})
        # Of a reply of nothing but whitespace, plain renders cannot tell whose whitespace it is.
        reply = {"role": "assistant", "content": content() + "x"}
        if random.random() < 0.25:
            arguments = {
                content() or "k": random.choice([content(), 1, None, [content()], True, 1.5])
            }
            messages += [reply | {"tool_calls": [call(**arguments)]}, result(content())]
        if random.random() < 0.15:
            reply["reasoning_content"] = content()
        messages.append(reply)
    return messages


def test_masks_of_random_conversations_equal_the_slow_method(real_data, folder):
    random, found = Random(3), Counter()
    for _ in range(12):
        messages = random_conversation(random)
        tools = TOOLS if any("tool_calls" in message for message in messages) else None
        for path in templates(real_data):
            found[judge(encoder(path, folder), "random", messages, tools, words=False)] += 1
    assert found["proven"] + found["proven, with errors"] > 0.55 * sum(found.values()), found


@pytest.mark.parametrize(
    ("vocabulary", "name", "proven"),
    [
        ("hf_derived/qwen2.5", "Qwen-Qwen2.5-7B-Instruct", 17),
        ("hf_derived/qwen2.5", "qwen2_5_training", 17),
        ("hf/phi-3-mini", "microsoft-Phi-3.5-mini-instruct", 15),
        ("hf/phi-3-mini", "phi3_training", 15),
    ],
)
def test_masks_with_the_models_own_tokenizers(real_data, tmp_path, vocabulary, name, proven):
    import gzip

    source = real_data / "tokenizers" / vocabulary
    zipped = source / "tokenizer.json.gz"
    content = (
        gzip.decompress(zipped.read_bytes())
        if zipped.exists()
        else (source / "tokenizer.json").read_bytes()
    )
    (tmp_path / "tokenizer.json").write_bytes(content)
    config = source / "tokenizer_config.json"
    names = '{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}'
    (tmp_path / "tokenizer_config.json").write_text(
        config.read_text() if config.exists() else names
    )
    tokenizer = load_tokenizer(tmp_path)
    variables = TOKENS | ({"eos_token": "<|endoftext|>"} if "phi" in vocabulary else {})
    text = next(path for path in templates(real_data) if path.stem == name).read_text(
        encoding="utf-8"
    )
    own = ChatEncoder(tokenizer, Template(source=text, name=name, variables=variables))
    found = Counter(
        judge(own, case, messages, with_tools(case)) for case, messages in CONVERSATIONS.items()
    )
    assert found["proven"] >= proven, found
    assert set(found) <= {"proven", "proven, with errors", "told", "refused"}


def test_errors_are_the_kinds_that_stand_against_training():
    stands_against = {
        "nothing_trained",
        "missing_terminator",
        "not_written",
        "foreign_text",
        "untraced",
        "unsupplied_header",
        "control_text",
    }
    assert set(ERRORS) == stands_against
