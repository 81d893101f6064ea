"""Makers of tiny vocabularies, for the fixtures and the tests."""

import json
from pathlib import Path
from typing import Any

from makers.texts import make_texts
from makers.tokenizers import byte_ranks

WORDS = [
    "the",
    "of",
    "and",
    "pump",
    "water",
    "turbine",
    "gate",
    "flows",
    "into",
    "steel",
    "12",
    "345",
    "don't",
    "Zürich",
    "don't",
    "水",
    "ёлка",
    "def",
    "return\n",
    "",
    "x",
    "=",
    "y\n\t",
]


def tokenizer_texts(count: int = 60) -> list[str]:
    return make_texts(count, 5, words=WORDS, longest=40, end="")


def train_sentencepiece(prefix: Path, texts: list[str], **changes: Any) -> Path:
    """Train a model with SentencePiece itself; `changes` override its settings."""
    from sentencepiece import SentencePieceTrainer

    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    settings = {
        "vocab_size": 360,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "control_symbols": ["[INST]"],
        "user_defined_symbols": ["<tool_call>"],
        "character_coverage": 0.99,
        "minloglevel": 2,
    }
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(prefix), **(settings | changes)
    )
    return prefix.with_suffix(".model")


def make_ranks() -> dict[bytes, int]:
    return byte_ranks(b" the", b" pump", b"water", b" 12", "水".encode())


def change_json(folder: Path, output: Path, **changes: Any) -> Path:
    """A copy of a tokenizer.json with other sections; returns the new file."""
    output.mkdir(parents=True, exist_ok=True)
    parsed = json.loads((folder / "tokenizer.json").read_text()) | changes
    (output / "tokenizer.json").write_text(json.dumps(parsed))
    return output / "tokenizer.json"
