"""Whether a prompt's ids are the first of the document's; and tokens that end where the prompt
ends.
"""

import pytest
from chat_makers import ALL_CONTROLS, ask, make_tokenizer, read_chat
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.tokenizers import CHATML, tiny_tokenizer
from penstock import load_tokenizer
from penstock.chat.encoder import ChatEncoder, encode
from penstock.chat.masks.mask_settings import MaskSettings
from penstock.chat.render.template import Template
from penstock.core.errors import ConfigError, ConversationError

LINES = ["\n\nHello", "\n\n", "a\n\nb", "\n\n\n", "assistant\n", "user\n", "hello there"] * 50


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Has a token of two line breaks."""
    folder = tmp_path_factory.mktemp("lines")
    tiny_tokenizer(folder, LINES, 300, ["<|im_start|>", "<|im_end|>"])
    made = load_tokenizer(folder)
    assert len(made.encode("\n\n")) == 1
    return made


def encoder(tokenizer, **mask):
    return ChatEncoder(tokenizer, Template(source=CHATML), MaskSettings(**mask))


def prompt_ids(tokenizer, chat, message):
    """By the plain means of a server: the text that prompts for a reply, encoded alone."""
    begin = chat.evidence[0].turns[message].begin
    return tokenizer.encode(chat.text[:begin], allow_control=True).tolist()


def test_a_reply_that_merges_with_its_prompt_is_reported(tokenizer):
    chat = encode(ask("hi", "\nHello", "hi", "Hello"), tokenizer=tokenizer, template=CHATML)
    [problem] = chat.certificate.problems
    assert (problem.kind, problem.message, problem.is_error) == ("merged_prompt", 1, False)
    assert r"within or before the token '\n\n'" in problem.text
    ids = prompt_ids(tokenizer, chat, 1)
    assert chat.tokens[: len(ids)].tolist() != ids


def test_split_makes_prompt_and_reply_of_their_own(tokenizer):
    chat = encode(
        ask("hi", "\nHello", "hi", "Hello"),
        tokenizer=tokenizer,
        template=CHATML,
        on_merged_prompt="split",
    )
    assert not chat.certificate.problems
    ids = prompt_ids(tokenizer, chat, 1)
    assert chat.tokens[: len(ids)].tolist() == ids
    assert chat.loss_weights[len(ids)] == 1
    assert [text for _, text in chat.trained_text] == ["\nHello<|im_end|>", "Hello<|im_end|>"]


def test_error_refuses_it(tokenizer):
    with pytest.raises(ConversationError, match=r"message 1.*on_merged_prompt"):
        encode(ask("hi", "\nHello"), tokenizer=tokenizer, template=CHATML, on_merged_prompt="error")


CONTENTS = st.text(st.sampled_from("\n ab\thello"), max_size=6)


@settings(max_examples=200, deadline=None)
@given(st.lists(CONTENTS, min_size=2, max_size=6).filter(lambda contents: len(contents) % 2 == 0))
def test_what_is_reported_is_what_a_server_would_see(tokenizer, contents):
    conversation = read_chat(ask(*contents))
    for how in ("report", "split"):
        [chat] = encoder(tokenizer, on_merged_prompt=how).encode(conversation)
        told = {
            problem.message
            for problem in chat.certificate.problems
            if problem.kind == "merged_prompt"
        }
        for message in range(1, len(contents), 2):
            if message not in chat.evidence[0].turns:
                continue
            ids = prompt_ids(tokenizer, chat, message)
            same = chat.tokens[: len(ids)].tolist() == ids
            # A later prompt has the merged token of an earlier reply in it.
            if not any(one < message for one in told) and (how == "report" or message == 1):
                assert same == (message not in told), (how, message, chat.text)


def test_tokenizers_that_put_a_space_before_texts_cannot_split(tmp_path):
    tokenizer = make_tokenizer(tmp_path, list(ALL_CONTROLS))
    tokenizer.adds_space = True
    with pytest.raises(ConfigError, match="on_merged_prompt"):
        encoder(tokenizer, on_merged_prompt="split")
