"""A small tokenizer and a small corpus, made here."""

import json
import random
from pathlib import Path

import pytest

from penstock.tokenizers import Tokenizer, train_tokenizer

WORDS = [
    "water",
    "wheel",
    "pipe",
    "turbine",
    "the",
    "and",
    "flows",
    "never",
    "stops",
    "größe",
    "水",
    "🙂",
    "\n",
    "a",
    "steel",
]


def make_texts(count: int, seed: int = 1) -> list[str]:
    noise = random.Random(seed)
    return [" ".join(noise.choices(WORDS, k=noise.randint(1, 60))) + f" {number}" for number in range(count)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer(make_texts(200), vocab_size=400, output=folder, progress=False)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three files of JSONL, some thousand records in all."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for number, count in enumerate((700, 3, 1500)):
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in make_texts(count, number)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small one with the control tokens of ChatML."""
    folder = tmp_path_factory.mktemp("chat tokenizer")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return train_tokenizer(make_texts(200), vocab_size=400, special_tokens=special, output=folder, progress=False)
