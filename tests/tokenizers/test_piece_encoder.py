"""Our own fast encoder gives the own encoder's ids, whatever the cache holds; its kernels against
plain Python.
"""

import json
import pickle
import threading
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import change_json

from makers.tokenizers import added_token
from penstock import load_tokenizer
from penstock.core.arrow import from_texts
from penstock.core.errors import TokenizerError
from penstock.tokenizers import Tokenizer, piece_cache
from penstock.tokenizers._split_kernels import texts_with
from penstock.tokenizers.encoder import load_encoder
from penstock.tokenizers.fast import text_buffers
from penstock.tokenizers.normal_forms import FORMS, Form, unsafe_characters
from penstock.tokenizers.piece_cache import PieceCache, frozen
from penstock.tokenizers.piece_encoder import PieceEncoder
from penstock.tokenizers.piece_model import LONGEST, PieceModel
from penstock.tokenizers.spelling import spell_as_characters
from tokenizers import normalizers

LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PLAIN = {**LEVEL, "use_regex": False}
TEXTS = st.lists(
    st.lists(
        st.one_of(
            st.sampled_from(
                [*" \n\t\r12xaé水ṩ'.,²٣½", "\u0301", "\u0323", "\u1100\u1161", "the water",
                 "12345", "   ", "\U00050000", "pump", "ab", "a\u0308", "A\u030a", "x" * 200]
            ),
            st.characters(codec="utf-8"),
        ),
        max_size=30,
    ).map("".join),
    max_size=6,
)  # fmt: skip
RELAXED = settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


def _steps(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


FALCON = _steps(
    {"type": "Punctuation", "behavior": "Contiguous"},
    LEVEL,
    {"type": "Digits", "individual_digits": False},
    _split("[0-9][0-9][0-9]"),
)
OWN = _steps(_split(r" ?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+"), PLAIN)


def _without(content: dict[str, Any], gone: bytes) -> dict[str, Any]:
    """The model without tokens for some bytes alone."""
    model = content["model"]
    names = {spell_as_characters(bytes([byte])) for byte in gone}
    kept = {token: number for token, number in model["vocab"].items() if token not in names}
    merges = [m for m in model["merges"] if not names & set(m)]
    return {**model, "vocab": kept, "merges": merges}


def _changes(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    model = content["model"]
    whole = {**model["vocab"], "Ġwa": len(model["vocab"]), "x" * 200: len(model["vocab"]) + 1}
    unknown = {**_without(content, b" 1x"), "unk_token": "Ġthe", "fuse_unk": True}
    unknown["vocab"] = {**unknown["vocab"], "Ġthe": model["vocab"].get("Ġthe", 5000)}
    return {
        "falcon": {"pre_tokenizer": FALCON},
        "own pattern": {"pre_tokenizer": OWN},
        "NFC": {"pre_tokenizer": OWN, "normalizer": {"type": "NFC"}},
        "NFKD, NFC": {
            "pre_tokenizer": OWN,
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "NFKD"}, {"type": "NFC"}],
            },
        },
        "missing bytes": {"pre_tokenizer": OWN, "model": _without(content, b" 1\xc3\xe6")},
        "unknown bytes": {"pre_tokenizer": OWN, "model": unknown},
        "ignore_merges": {
            "pre_tokenizer": OWN,
            "model": {**model, "vocab": whole, "ignore_merges": True},
        },
        "gaps in ids": {
            "pre_tokenizer": OWN,
            "model": {
                **model,
                "vocab": {token: 3 * number for token, number in model["vocab"].items()},
            },
            "added_tokens": [],
        },
        "content": {
            "pre_tokenizer": _steps({"type": "Digits", "individual_digits": True}, LEVEL),
            "normalizer": {"type": "NFC"},
            "added_tokens": [
                *content["added_tokens"],
                added_token("12", 500, special=False),
                added_token("a\u0308", 501, special=False),
            ],
        },
    }


@pytest.fixture(
    scope="module",
    params=["falcon", "own pattern", "NFC", "NFKD, NFC", "missing bytes", "unknown bytes",
            "ignore_merges", "gaps in ids", "content"],
)  # fmt: skip
def by_pieces(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    trained = request.getfixturevalue("trained")
    content = json.loads((trained / "tokenizer.json").read_text())
    folder = tmp_path_factory.mktemp("pieces")
    path = change_json(trained, folder, **_changes(content)[request.param])
    if request.param == "gaps in ids":
        return Tokenizer("gaps", {"tokenizer.json": path.read_bytes()})
    return load_tokenizer(path)


@RELAXED
@given(texts=TEXTS)
def test_ids_are_the_own_encoders(by_pieces: Tokenizer, texts: list[str]) -> None:
    assert (by_pieces.encoder, by_pieces.fallback_reason) == ("penstock", None)
    assert by_pieces.check_encoder(texts) is None
    own = by_pieces._encode_slowly(from_texts(texts))
    for array in (pa.array(texts, pa.string()), pa.array(["gone", *texts], pa.large_string())[1:]):
        ids = by_pieces.encode_batch(array)
        assert [row.tolist() for row in ids] == [row.tolist() for row in own]
    assert [by_pieces.encode(text).tolist() for text in texts] == [row.tolist() for row in own]


def test_a_copy_encodes_the_same_way(by_pieces: Tokenizer, hard_texts: list[str]) -> None:
    copy = pickle.loads(pickle.dumps(by_pieces))
    assert (copy.encoder, copy.fingerprint) == ("penstock", by_pieces.fingerprint)
    texts = from_texts(hard_texts)
    assert np.array_equal(copy.encode_batch(texts).values, by_pieces.encode_batch(texts).values)


def test_texts_with_an_added_entry_are_for_the_own_encoder(trained: Path, tmp_path: Path) -> None:
    content = json.loads((trained / "tokenizer.json").read_text())
    tokenizer = load_tokenizer(change_json(trained, tmp_path, **_changes(content)["content"]))
    fast = tokenizer._fast
    assert isinstance(fast, PieceEncoder)
    texts = from_texts(["x12", "1 2", "a\u0308", "\xe4", "b"])
    assert fast.encode_batch(texts)[1].tolist() == [0, 2, 3]
    own = tokenizer._encode_slowly(texts)
    assert np.array_equal(tokenizer.encode_batch(texts).values, own.values)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "it normalises text by Lowercase"),
        (
            {"added_tokens": [added_token(f"w{i}", 500 + i, special=False) for i in range(10, 80)]},
            "it has more than 64 added entries",
        ),
        ({"pre_tokenizer": _steps(_split("^a"), PLAIN)}, r"its pattern '\^a' has"),
    ],
)
def test_what_neither_can_do_says_why(
    trained: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    path = change_json(trained, tmp_path, **{"pre_tokenizer": FALCON, **changes})
    tokenizer = load_tokenizer(path)
    assert tokenizer.encoder == "tokenizers"
    with pytest.raises(TokenizerError, match=f"gigatoken cannot .*; nor can penstock: {reason}"):
        raise TokenizerError(str(tokenizer.fallback_reason))


def test_a_wrong_piece_is_found_and_left(trained: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(change_json(trained, tmp_path, pre_tokenizer=OWN))
    fast = tokenizer._fast
    assert isinstance(fast, PieceEncoder)
    fast.cache._model._byte_ids[ord("w")] += 1
    reason = tokenizer.check_encoder(["w"])
    assert reason is not None
    assert "penstock and tokenizers disagree on 'w', from token 0" in reason
    assert tokenizer.encoder == "tokenizers"


class PlainModel:
    """Every piece has as many ids as its length modulo 5, which tell its bytes."""

    def __init__(self) -> None:
        self.whole: dict[bytes, int] = {b"whole": 77, b"w" * 30: 78}
        self.asked: list[bytes] = []

    def ids(self, piece: bytes) -> list[int]:
        if piece in self.whole:
            return [self.whole[piece]]
        scale = (1 << 32) // 300 if piece[0] % 2 else 1
        return [scale * sum(piece) % (1 << 32) + place for place in range(len(piece) % 5)]

    def encode(self, data: Any, begins: Any, ends: Any) -> tuple[Any, Any]:
        pieces = [bytes(data[low:high]) for low, high in zip(begins, ends, strict=True)]
        self.asked += pieces
        ids = [self.ids(piece) for piece in pieces]
        bounds = np.cumsum([0, *map(len, ids)])
        return np.array([one for row in ids for one in row], np.uint32), bounds


def _places(pieces: Sequence[bytes]) -> tuple[Any, Any]:
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int32)
    data = frozen(np.frombuffer(b"".join(pieces), np.uint8))
    return data, np.stack([ends - np.array([len(piece) for piece in pieces], np.int32), ends])


PIECES = st.lists(
    st.one_of(
        st.sampled_from([b"whole", b"w" * 30, b"a" * 15, b"a" * 16, b"\0", b"\0\0", b"a\0"]),
        st.binary(min_size=1, max_size=40),
        st.binary(min_size=1, max_size=2),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(batches=st.lists(PIECES, max_size=6), most=st.integers(1, 40), segment=st.integers(1, 30))
def test_the_cache_gives_the_models_ids_however_often_it_begins_again(
    batches: list[list[bytes]], most: int, segment: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piece_cache, "SEGMENT", segment)
        patch.setattr(piece_cache, "_FIRST_SLOTS", 4)
        patch.setattr(piece_cache, "_FIRST_BYTES", 64)
        model = PlainModel()
        cache = PieceCache(model, most=most, longest=33)  # type: ignore[arg-type]
        for pieces in batches:
            ids, bounds = cache.encode(*_places(pieces))
            expected = [model.ids(piece) for piece in pieces]
            assert bounds.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
            assert ids.tolist() == [one for row in expected for one in row]
            assert len(cache) <= most + segment + 2


def test_a_piece_is_encoded_once_and_a_long_one_each_time() -> None:
    model = PlainModel()
    cache = PieceCache(model)  # type: ignore[arg-type]
    pieces = [b"ab", b"cd", b"ab", b"whole", b"x" * 20, b"y" * (LONGEST + 1)]
    for _ in range(2):
        cache.encode(*_places(pieces))
    assert model.asked == [b"ab", b"cd", b"x" * 20, pieces[-1], pieces[-1]]
    assert len(cache) == 5


def test_threads_share_a_cache() -> None:
    model = PlainModel()
    cache = PieceCache(model, most=300)  # type: ignore[arg-type]
    drawn = np.random.default_rng(1).integers(0, 3000, (8, 4000))
    wrong: list[int] = []

    def work(numbers: Any) -> None:
        pieces = [
            f"piece {number} of many, more or less"[: 8 + number % 20].encode()
            for number in numbers
        ]
        for _ in range(5):
            ids, _ = cache.encode(*_places(pieces))
            if ids.tolist() != [one for piece in pieces for one in model.ids(piece)]:
                wrong.append(1)

    threads = [threading.Thread(target=work, args=(numbers,)) for numbers in drawn]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _merged(
    piece: bytes, ids: dict[bytes, int], ranks: dict[tuple[bytes, bytes], int]
) -> list[int]:
    """Merges in plain Python."""
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = enumerate(pairwise(parts))
        ways = [(ranks[pair], at) for at, pair in pairs if pair in ranks]
        if not ways:
            return [ids[part] for part in parts]
        at = min(ways)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=30),
    pieces=st.lists(
        st.text("abc", min_size=1, max_size=20).map(str.encode), min_size=1, max_size=20
    ),
    missing=st.booleans(),
)
def test_merges_are_those_of_plain_python_and_of_the_package(
    pairs: list[tuple[int, int]], pieces: list[bytes], missing: bool
) -> None:
    tokens = [b"a", b"b", b"c"]
    merges: list[tuple[bytes, bytes]] = []
    for left, right in pairs:
        pair = tokens[left % len(tokens)], tokens[right % len(tokens)]
        merges.append(pair)
        if b"".join(pair) not in tokens:
            tokens.append(b"".join(pair))
    vocabulary = {token.decode(): number for number, token in enumerate(tokens)}
    spelled = [[left.decode(), right.decode()] for left, right in merges]
    model = {"type": "BPE", "vocab": vocabulary, "merges": spelled}
    encoder = load_encoder({"version": "1.0", "added_tokens": [], "model": model})
    data, places = _places(pieces)
    kernel = PieceModel(model, encoder)
    if missing:
        kernel._byte_ids[ord("b")] = -1  # these pieces go to the package
    ids, bounds = kernel.encode(data, *places.astype(np.int64))
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    numbers = {token: number for number, token in enumerate(tokens)}
    for piece, (low, high) in zip(pieces, pairwise(bounds), strict=True):
        assert ids[low:high].tolist() == _merged(piece, numbers, ranks)
        assert ids[low:high].tolist() == encoder.encode(piece.decode()).ids


@pytest.mark.parametrize("form", FORMS)
def test_characters_that_are_trusted_change_no_text(form: Form) -> None:
    unsafe = unsafe_characters(form)
    trusted = np.flatnonzero(~unsafe)
    assert len(trusted) > (20_000 if form.endswith("D") else 30_000)
    normalise = getattr(normalizers, form)().normalize_str
    for order in (trusted, trusted[::-1], np.random.default_rng(1).permutation(trusted)):
        text = "".join(map(chr, order.tolist()))
        assert normalise(text) == text == unicodedata.normalize(form, text)


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS)
def test_texts_with_marked_characters_are_found(texts: list[str]) -> None:
    data, offsets = text_buffers(pa.array(texts, pa.large_string()))
    found = np.empty(len(texts), np.bool_)
    unsafe = unsafe_characters("NFC")
    texts_with(frozen(data), offsets, unsafe, found)
    assert found.tolist() == [any(unsafe[ord(one)] for one in text) for text in texts]
