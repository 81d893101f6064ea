"""Encoding of rendered text with vocabularies that are no tokenizer.json: tiktoken, tekken,
SentencePiece.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoding_makers import WORDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from makers.tokenizers import byte_ranks
from penstock import load_tokenizer
from penstock.chat.tokens.encoding import encode_rendered
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.split_patterns import CL100K_PATTERN, TEKKEN_PATTERN

CONTROLS = ["[INST]", "[/INST]", "</s>"]
ODD = ["[", "INST", "]", " ", "  ", "\n", "🤦🏼\u200d♂️", "é"]
PIECES = st.tuples(st.sampled_from(CONTROLS * 3 + WORDS + ODD), st.booleans())
slowly = settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def open_tiktoken(folder: Path) -> Tokenizer:
    ranks = byte_ranks(b" the", b" pump", b"water", "水".encode())
    lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (folder / "tiny.tiktoken").write_bytes(lines)
    controls = {text: len(ranks) + place for place, text in enumerate(CONTROLS)}
    (folder / "encoding.json").write_text(
        json.dumps({"pattern": CL100K_PATTERN, "special_tokens": controls})
    )
    return load_tokenizer(folder / "tiny.tiktoken")


def open_tekken(folder: Path) -> Tokenizer:
    ranks = byte_ranks(b" the", b" pump", b"water", "水".encode())
    config = {
        "pattern": TEKKEN_PATTERN,
        "default_vocab_size": len(ranks) + 30,
        "default_num_special_tokens": 30,
    }
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()}
        for token, rank in ranks.items()
    ]
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))
    return load_tokenizer(folder / "tekken.json")


def open_sentencepiece(folder: Path, rule: str) -> Tokenizer:
    from sentencepiece import SentencePieceTrainer

    lines = [
        " ".join(WORDS[place:] + WORDS[:place]).replace("\n", " ") for place in range(len(WORDS))
    ]
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 4),
        model_prefix=str(folder / "tiny"),
        vocab_size=310,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name=rule,
        remove_extra_whitespaces=False,
        control_symbols=CONTROLS[:1],
        user_defined_symbols=CONTROLS[1:2],
        character_coverage=0.98,
        minloglevel=2,
    )
    return load_tokenizer(folder / "tiny.model")


@pytest.fixture(scope="module", params=["tiktoken", "tekken", "identity", "nmt_nfkc"])
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("formats")
    if request.param == "tiktoken":
        return open_tiktoken(folder)
    return (
        open_tekken(folder)
        if request.param == "tekken"
        else open_sentencepiece(folder, request.param)
    )


def encode_slowly(ours: Tokenizer, text: str, literal: Any) -> list[int]:
    """Each stretch between control text of the template as a text of its own."""
    ids, done = [], 0
    for found in re.finditer("|".join(map(re.escape, CONTROLS)), text):
        if literal[found.start() : found.end()].all():
            ids += [
                *ours.encode(text[done : found.start()]).tolist(),
                ours.special_tokens[found.group()],
            ]
            done = found.end()
    return ids + ours.encode(text[done:]).tolist()


@slowly
@given(pieces=st.lists(PIECES, max_size=12))
def test_stretches_between_control_text(ours: Tokenizer, pieces: list[tuple[str, bool]]) -> None:
    text = "".join(text for text, _ in pieces)
    literal = np.array([flag for text, flag in pieces for _ in text], np.bool_)
    encoded = encode_rendered(ours, text, literal)
    assert encoded.ids.tolist() == encode_slowly(ours, text, literal)
    allowed = encode_rendered(ours, text, literal, allow_forged=True)
    assert allowed.ids.tolist() == ours.encode(text, allow_control=True).tolist()
    touched = {
        place
        for begin, end in zip(encoded.begins, encoded.ends, strict=True)
        for place in range(begin, end)
    }
    assert touched == set(range(len(text)))
    assert (encoded.begins[1:] >= encoded.ends[:-1] - 1).all()
    assert (np.diff(encoded.begins) >= 0).all()


def test_positions_where_text_is_normalised(tmp_path: Path) -> None:
    ours = open_sentencepiece(tmp_path, "nmt_nfkc")
    text = "the ｐｕｍｐ 🤦 water[INST]x"
    encoded = encode_rendered(ours, text, np.ones(len(text), np.bool_))
    covered = [text[begin:end] for begin, end in zip(encoded.begins, encoded.ends, strict=True)]
    assert covered.count("🤦") == 4  # four byte pieces
    assert "[INST]" in covered
    assert "ｐｕｍｐ" in "".join(covered)
