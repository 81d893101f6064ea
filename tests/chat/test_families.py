"""The family data: whole, consistent, and refused where it does not fit a tokenizer."""

import logging
import re

import pytest

from makers.tokenizers import tiny_tokenizer
from penstock.chat.masks.families import detect_family, families, family, token_id
from penstock.chat.masks.scanning import scan
from penstock.core.errors import ConfigError

LISTED = (
    "qwen2_vl",
    "qwen3_5",
    "gemma3",
    "gemma3n",
    "gemma4",
    "llama3_2_vision",
    "llama4",
    "pixtral",
    "mistral_v7_tekken",
    "paddleocr_vl",
    "voxtral",
    "smolvlm2",
    "mistral3",
    "internvl",
    "glm4v",
    "llava",
    "lfm2_vl",
    "chatml",
    "llama3",
    "llama2",
    "mistral_v1",
    "mistral_v3",
    "phi_3",
    "phi_4",
    "deepseek",
    "zephyr",
    "gemma",
    "command_r",
    "gpt_oss",
    "glm4",
    "kimi",
    "granite",
    "exaone",
)
"""All families of the two tables of the reference."""

CONTROL = re.compile(r"<\|[^|>]+\|>|<｜[^｜]+｜>|<\|?\w+\|?>|\[/?[A-Z_]+\]|\[\|\w+\|\]")


def tokenizer_of(name, folder, without=()):
    entry = family(name)
    tokens = dict.fromkeys((*entry.control, *entry.optional, *entry.media, *entry.stop))
    controls = [text for text in tokens if text != "eos_token" and text not in without]
    texts = ["\n\n one\n two\n\n\n three"] * 20
    return tiny_tokenizer(folder, texts, 320, controls)


def needs(marker, tokens):
    return any(token in marker for token in tokens)


def test_every_family_is_there():
    assert set(LISTED) <= set(families())
    with pytest.raises(ConfigError, match="no family 'lama3'; there are qwen3_5, "):
        family("lama3")


@pytest.mark.parametrize("name", families())
def test_the_entry_is_whole(name):
    entry = family(name)
    assert entry.kind in ("text", "multimodal")
    assert entry.title
    assert entry.signs
    assert entry.stop
    assert bool(entry.media) == (entry.kind == "multimodal")
    roles = {boundary.role for boundary in entry.boundaries}
    assert {"user", "assistant"} <= roles <= {"system", "developer", "user", "assistant", "tool"}
    for boundary in entry.boundaries:
        # A turn that nothing closes would swallow what follows, also where the tokenizer lacks
        # optional tokens.
        closing = [
            m
            for m in (*(boundary.end or ()), *(boundary.until or ()))
            if not needs(m, entry.optional)
        ]
        assert closing or needs(boundary.start, entry.optional), boundary


@pytest.mark.parametrize("name", families())
def test_markers_name_only_known_control_tokens(name):
    entry = family(name)
    plain = name in ("zephyr", "llama2", "mistral_v1")
    markers = [
        m
        for b in entry.boundaries
        for m in (b.start, *(b.end or ()), *(b.until or ()))
        if m != "eos_token"
    ]
    named = {token for marker in markers for token in CONTROL.findall(marker)}
    assert plain or named <= {*entry.control, *entry.optional, *entry.stop}


@pytest.mark.parametrize("name", families())
def test_a_conversation_of_its_own_markers(name, tmp_path):
    entry = family(name)
    tokenizer = tokenizer_of(name, tmp_path)
    start = {
        role: next(b for b in entry.boundaries if b.role == role) for role in ("user", "assistant")
    }
    ends = start["assistant"].end
    end = "<|eos|>" if ends[0] == "eos_token" else ends[0]
    # GLM's end of the assistant is the start of the user's turn.
    again = (
        ""
        if start["assistant"].end_starts_next and end == start["user"].start
        else start["user"].start
    )
    user_end = next((m for m in start["user"].end or () if m != start["assistant"].start), "")
    user_end = "<|eos|>" if user_end == "eos_token" else user_end
    assert tokenizer.special_tokens.get("<|eos|>") == tokenizer.eos_id
    text = "".join(
        (
            start["user"].start,
            "ask",
            user_end,
            start["assistant"].start,
            "tell",
            end,
            again,
            "more",
            user_end,
        )
    )
    ids = tokenizer.encode(text, allow_control=True)
    weights = scan(ids, entry.resolve(tokenizer))
    assert tokenizer.decode(ids[weights > 0]) == "tell" + end


def test_a_tokenizer_of_another_family_is_refused(tmp_path):
    tokenizer = tokenizer_of("gemma", tmp_path)
    message = (
        r"family 'chatml': the tokenizer has no control token <\|im_start\|>, <\|im_end\|>.*ChatML"
    )
    with pytest.raises(ConfigError, match=message):
        family("chatml").resolve(tokenizer)


def test_markers_with_missing_optional_tokens_are_left_out_and_that_is_said(tmp_path, caplog):
    tokenizer = tokenizer_of("llama3", tmp_path, without=["<|eom_id|>"])
    with caplog.at_level(logging.INFO, logger="penstock.chat"):
        resolved = family("llama3").resolve(tokenizer)
    assert (
        "family llama3: this tokenizer has no <|eom_id|>; markers with these are left out"
        in caplog.messages
    )
    (assistant,) = [boundary for boundary in resolved if boundary.role == "assistant"]
    assert [marker.ids for marker in assistant.ends] == [(tokenizer.special_tokens["<|eot_id|>"],)]


def test_media_and_stop_ids_are_those_that_the_tokenizer_has(tmp_path):
    tokenizer = tokenizer_of("qwen2_vl", tmp_path, without=["<|video_pad|>"])
    specials = tokenizer.special_tokens
    assert family("qwen2_vl").media_ids(tokenizer) == (specials["<|image_pad|>"],)
    assert family("qwen2_vl").stop_ids(tokenizer) == (specials["<|im_end|>"],)
    assert family("mistral_v1").stop_ids(tokenizer) == (tokenizer.eos_id,)


class Unknowing:
    """A tokenizer that gives the unknown token's id for what it does not know, and one entry that
    is that token.
    """

    unk_token_id = 3
    eos_token_id = None

    def get_vocab(self):
        return {"<image>": 7, "<video>": 3}


def test_the_unknown_token_is_never_a_media_token():
    assert token_id("<image>", Unknowing()) == 7
    assert token_id("<video>", Unknowing()) is None
    assert token_id("<audio>", Unknowing()) is None
    assert token_id("eos_token", Unknowing()) is None


def test_detection_by_markers():
    assert detect_family("{{ '<|im_start|>' + role }}{{ '<|im_end|>' }}").name == "chatml"
    assert (
        detect_family("{{ '<|im_start|>' }}{{ '<|im_end|>' }}{{ '<|image_pad|>' }}").name
        == "qwen2_vl"
    )
    assert detect_family(r"{{ '<|assistant|>\n' + text + eos_token }}").name == "zephyr"
    assert detect_family("### Instruction: {{ text }}") is None


def test_the_boundaries_of_a_tokenizer_are_found_once(tmp_path):
    entry, tokenizer = family("chatml"), tokenizer_of("chatml", tmp_path / "one")
    found = entry.resolve(tokenizer)
    assert entry.resolve(tokenizer) is found
    other = tokenizer_of("gemma", tmp_path / "other")
    with pytest.raises(ConfigError, match="no control token"):
        entry.resolve(other)
    assert family("gemma").resolve(other) != found
