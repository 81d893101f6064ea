"""Without gigatoken ids are the same; where penstock cannot encode fast itself, that is reported; a
missing package is named.
"""

import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock import load_tokenizer
from penstock.core.errors import MissingExtraError
from penstock.tokenizers import Tokenizer


@pytest.fixture
def without_gigatoken(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gigatoken", "gigatoken.gigatoken_rs", "gigatoken._load.sentencepiece"):
        monkeypatch.setitem(sys.modules, module, None)


def test_ids_and_token_ends_are_the_same(
    exact: Tokenizer, hard_texts: list[str], request: pytest.FixtureRequest
) -> None:
    texts = pa.array(hard_texts)
    ids, singles = exact.encode_batch(texts), [exact.encode(text) for text in hard_texts]
    ends = exact.token_ends_batch(texts, ids)
    assert exact.encoder == "gigatoken"
    request.getfixturevalue("without_gigatoken")
    slow = Tokenizer(exact.name, exact.source_bytes)
    again = slow.encode_batch(texts)
    is_json = "tokenizer.json" in slow.source_bytes
    assert slow.encoder == ("penstock" if is_json else slow._vocabulary.own_encoder)
    assert (again.values.dtype, again.offsets.dtype) == (ids.values.dtype, ids.offsets.dtype)
    assert np.array_equal(again.values, ids.values)
    assert np.array_equal(again.offsets, ids.offsets)
    assert np.array_equal(slow.token_ends_batch(texts, again).values, ends.values)
    for text, single in zip(hard_texts, singles, strict=True):
        assert slow.encode(text).tolist() == single.tolist()
    assert slow.fingerprint == exact.fingerprint


@pytest.mark.usefixtures("without_gigatoken")
def test_it_says_what_is_missing_what_that_costs_and_the_cure(
    trained: Path, sentencepiece_file: Path
) -> None:
    assert load_tokenizer(trained).fallback_reason is None
    tokenizer = load_tokenizer(sentencepiece_file)
    assert tokenizer.encoder == "sentencepiece"
    for one in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert "gigatoken does not load" in str(one.fallback_reason)
        assert "about 80 times as long" in str(one.fallback_reason)
        assert "pip install gigatoken" in str(one.fallback_reason)


@pytest.mark.parametrize(
    ("package", "file"),
    [
        ("sentencepiece", "sentencepiece_file"),
        ("tiktoken", "tiktoken_file"),
        ("tiktoken", "tekken_file"),
    ],
)
def test_a_missing_package_is_named_only_when_its_files_are_loaded(
    package: str,
    file: str,
    trained: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = request.getfixturevalue(file)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package}.*needs.*install.*{package}"):
        load_tokenizer(path)
    assert load_tokenizer(trained).encode("the pump").size
