"""Tiny tokenizers of every format, made in milliseconds."""

import base64
import json
from pathlib import Path

import pytest
from tiny_tokenizers import make_ranks, tokenizer_texts, train_sentencepiece

from makers.tokenizers import tiny_tokenizer
from penstock import load_tokenizer
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.split_patterns import CL100K_PATTERN, TEKKEN_PATTERN


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return tokenizer_texts()


@pytest.fixture(scope="session")
def hard_texts(texts: list[str]) -> list[str]:
    """Ordinary text, and what breaks tokenizers; no literal ▁, all in NFC."""
    spaces = ["", " ", "  two", "two  ", "\n\n\n", "\t\tx", "\r\n", "\u2028\x85"]
    odd = ["\x00", "\ufeffbom", "\u0301a", "🤦🏼\u200d♂️", "'LL 1234567"]
    controls = ["<|bos|>", "a <|eos|><|user|> b", "<s></s><unk>", "<0x41>", "<tool_call>", "[INST]"]
    return [*texts, *spaces, *odd, *controls]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A folder with a byte-level BPE of ours."""
    folder = tmp_path_factory.mktemp("trained") / "tiny"
    tiny_tokenizer(folder, texts, 400, ["<|user|>"])
    return folder


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A SentencePiece BPE with byte fallback, a control piece and user-defined pieces."""
    return train_sentencepiece(tmp_path_factory.mktemp("spm") / "tiny", texts)


@pytest.fixture(scope="session")
def tiktoken_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ranks with the pattern beside them."""
    folder = tmp_path_factory.mktemp("tiktoken")
    ranks = make_ranks()
    lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (folder / "tiny.tiktoken").write_bytes(lines)
    encoding = {"pattern": CL100K_PATTERN, "special_tokens": {"<|endoftext|>": len(ranks)}}
    (folder / "encoding.json").write_text(json.dumps(encoding))
    return folder / "tiny.tiktoken"


@pytest.fixture(scope="session")
def tekken_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tekken.json with 30 control entries, and one rank more than its size allows."""
    ranks = make_ranks()
    config = {
        "pattern": TEKKEN_PATTERN,
        "default_vocab_size": len(ranks) + 30,
        "default_num_special_tokens": 30,
    }
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()}
        for token, rank in ranks.items()
    ]
    path = tmp_path_factory.mktemp("tekken") / "tekken.json"
    path.write_text(
        json.dumps(
            {"config": config, "vocab": [*vocab, {"rank": len(vocab), "token_bytes": "eHl6"}]}
        )
    )
    return path


@pytest.fixture(params=["trained", "sentencepiece_file", "tiktoken_file", "tekken_file"])
def exact(request: pytest.FixtureRequest) -> Tokenizer:
    """One tokenizer of each kind that has an exact byte table."""
    return load_tokenizer(request.getfixturevalue(request.param))
