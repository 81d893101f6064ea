"""Small tokenizers, a small corpus, and a store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from makers.object_store import ObjectStore, s3_store
from makers.texts import WATER, make_texts, write_texts
from makers.tokenizers import CHAT_CONTROLS, tiny_tokenizer
from penstock.tokenizers import Tokenizer


def numbered_texts(count: int, seed: int = 1) -> list[str]:
    """Texts of which no two are equal."""
    words = [*WATER, "never", "stops"]
    return [
        f"{text} {n}"
        for n, text in enumerate(
            make_texts(count, seed, words=words, shortest=1, longest=60, end="")
        )
    ]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), numbered_texts(200), 400)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three files of JSONL, some thousand records in all."""
    for number, count in enumerate((700, 3, 1500)):
        write_texts(tmp_path / "raw" / f"{number}.jsonl", numbered_texts(count, number))
    return tmp_path / "raw"


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small one with the control tokens of ChatML."""
    controls = ["<|endoftext|>", *CHAT_CONTROLS]
    return tiny_tokenizer(
        tmp_path_factory.mktemp("chat tokenizer"), numbered_texts(200), 400, controls
    )


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The S3 of this process, with an empty bucket of the name `bucket`."""
    pytest.importorskip("s3fs")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("penstock.data.stores.store.PAUSE_SECONDS", 0.01)
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    with s3_store(tmp_path / "store", monkeypatch) as found:
        yield found
