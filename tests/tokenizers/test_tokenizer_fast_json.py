"""What gigatoken is given of a tokenizer.json: missing bytes, digits, refusals; one parse."""

import json
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import change_json
from tokenizers.pre_tokenizers import Digits

import penstock as ps
from makers.tokenizers import added_token
from penstock import load_tokenizer
from penstock.core import large_json
from penstock.core.arrow import from_texts
from penstock.core.errors import TokenizerError
from penstock.core.large_json import canonical_json, parse_large_json
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.byte_level import byte_level_encoder
from penstock.tokenizers.digits import DigitCuts, digits
from penstock.tokenizers.encoder import load_encoder
from penstock.tokenizers.fast import FastEncoder, text_buffers
from penstock.tokenizers.huggingface import HuggingFaceVocabulary
from penstock.tokenizers.spelling import spell_as_characters
from tokenizers import Tokenizer as Encoder

RARE = [0x04, 0x06, 0x16, 0xC0, 0xF1, 0xF5]
ODD = ["\x04", "\x16", "\U00050000", "1", "٣", "½", "Ⅳ", "\u0301", " ", "\n", "the", " water", "Ö"]
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PLAIN = {**LEVEL, "use_regex": False}
TEXTS = st.lists(st.one_of(st.sampled_from(ODD), st.characters(codec="utf-8")), max_size=30)
RELAXED = settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


def _steps(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _digits(each: bool) -> dict[str, Any]:
    return {"type": "Digits", "individual_digits": each}


def _split(pattern: dict[str, str], behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}


def _without(folder: Path, output: Path, gone: list[int], **changes: Any) -> Path:
    """A vocabulary in which some bytes have no token."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    names = [spell_as_characters(bytes([byte])) for byte in gone]
    kept = {t: i for t, i in model["vocab"].items() if not any(name in t for name in names)}
    merges = [m for m in model["merges"] if not any(name in "".join(m) for name in names)]
    return change_json(folder, output, model={**model, "vocab": kept, "merges": merges}, **changes)


CHANGES: dict[str, dict[str, Any]] = {
    "missing": {},
    "each digit": {"pre_tokenizer": _steps(_digits(True), LEVEL)},
    "runs of digits": {
        "pre_tokenizer": _steps(_digits(False), LEVEL),
        "normalizer": {"type": "NFC"},
    },
    "a sequence of one": {"pre_tokenizer": _steps(LEVEL)},
}


@pytest.fixture(scope="module", params=list(CHANGES))
def changed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    trained, folder = request.getfixturevalue("trained"), tmp_path_factory.mktemp("changed")
    return load_tokenizer(_without(trained, folder, RARE, **CHANGES[request.param]))


@RELAXED
@given(rows=st.lists(TEXTS, max_size=6))
def test_missing_bytes_and_digits_give_the_own_ids(
    changed: Tokenizer, rows: list[list[str]]
) -> None:
    texts = ["".join(row) for row in rows]
    assert (changed.encoder, changed.check_encoder(texts)) == ("gigatoken", None)
    ids = changed.encode_batch(from_texts(texts))
    own = changed._encode_slowly(from_texts(texts))
    assert [row.tolist() for row in ids] == [row.tolist() for row in own]
    assert [changed.encode(text).tolist() for text in texts] == [row.tolist() for row in own]


def test_probes_have_every_missing_byte_that_text_can_have(changed: Tokenizer) -> None:
    fast = changed._fast
    assert isinstance(fast, FastEncoder)
    assert set(b"".join(text.encode() for text in fast.probes)) >= {0x04, 0x06, 0x16, 0xF1}
    assert len(fast.encode_batch(from_texts(fast.probes))[1]) == 4


@RELAXED
@given(rows=st.lists(TEXTS, max_size=5), each=st.booleans())
def test_digits_are_cut_as_the_tokenizers_package_cuts_them(
    rows: list[list[str]], each: bool
) -> None:
    texts = ["".join(row) for row in rows]
    data, offsets = text_buffers(pa.array(texts, pa.large_string()))
    bounds, firsts = DigitCuts(each).cut(data, offsets)
    found = [
        [bytes(data[bounds[i] : bounds[i + 1]]).decode() for i in range(low, high)]
        for low, high in pairwise(firsts)
    ]
    cut = Digits(individual_digits=each)
    assert found == [[piece for piece, _ in cut.pre_tokenize_str(text)] for text in texts]


def test_no_digit_takes_part_in_a_normal_form() -> None:
    """So text may be cut at digits before it is normalised."""
    for code in np.flatnonzero(digits()).tolist():
        assert unicodedata.combining(chr(code)) == 0
    for code in [*range(0xD800), *range(0xE000, 0x110000)]:
        forms = {unicodedata.normalize(form, chr(code)) for form in ("NFC", "NFD")}
        if forms != {chr(code)}:
            assert not any(
                digits()[[ord(c) for c in form if ord(c) < len(digits())]].any() for form in forms
            )


def _refusal(tokenizer: Tokenizer) -> str:
    """Why gigatoken does not encode."""
    vocabulary = tokenizer._vocabulary
    assert isinstance(vocabulary, HuggingFaceVocabulary)
    if vocabulary.kind != "byte-level BPE":
        return str(tokenizer.fallback_reason)
    added = [text for text, number in vocabulary._added.items() if number in vocabulary._content]
    with pytest.raises(TokenizerError, match="gigatoken cannot encode it") as caught:
        byte_level_encoder(vocabulary._scrubbed_json, vocabulary.size, added)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre_tokenizer": PLAIN}, "it splits text by ByteLevel"),
        ({"pre_tokenizer": _steps(_digits(True), _split({"Regex": "x"}), LEVEL)}, "Digits, Split"),
        ({"pre_tokenizer": _steps(_split({"String": " "}), PLAIN)}, "'String': ' '"),
        ({"pre_tokenizer": _steps(_split({"Regex": "x"}, "Removed"), PLAIN)}, "'Regex': 'x'"),
        ({"pre_tokenizer": None}, "neither of bytes nor"),
        ({"pre_tokenizer": _steps(_digits(True), {**LEVEL, "add_prefix_space": True})}, "Digits"),
        (
            {
                "pre_tokenizer": _steps(_digits(True), LEVEL),
                "added_tokens": [added_token("a1", 500, special=False)],
            },
            "its added entries have some",
        ),
    ],
)
def test_what_gigatoken_would_ignore_is_refused(
    trained: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    tokenizer = load_tokenizer(change_json(trained, tmp_path, **changes))
    assert tokenizer.encoder != "gigatoken"
    assert reason in _refusal(tokenizer)


@pytest.mark.parametrize("gone", [[0x20], [0x0A], [*range(9), *range(0xE0, 0xFF)]])
def test_many_missing_bytes_or_common_ones_are_refused(
    trained: Path, tmp_path: Path, gone: list[int]
) -> None:
    tokenizer = load_tokenizer(_without(trained, tmp_path, gone))
    assert tokenizer.encoder == "penstock"
    assert f"no token for {len(gone)} of the 256 bytes alone" in _refusal(tokenizer)


def test_an_encoder_of_objects_is_that_of_the_json(trained: Path) -> None:
    content = json.loads((trained / "tokenizer.json").read_text())
    first = content["model"]["merges"][0]
    for merges in ([first], [tuple(first)], [" ".join(first)], []):
        one = {**content, "model": {**content["model"], "merges": merges}}
        assert load_encoder(one).to_str() == Encoder.from_str(json.dumps(one)).to_str()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=60)
@given(value=VALUES)
def test_canonical_json_in_parts_is_that_of_the_whole(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "_PART", 2)
        parts = b"".join(canonical_json(value))
    assert parts == json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    assert parse_large_json(json.dumps(value, indent=6).encode()) == value


def test_preparing_parses_the_vocabulary_once(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = (trained / "tokenizer.json").stat().st_size // 3
    parsed, written = [], []
    loads, dumps = json.loads, json.dumps

    def counted_loads(text: Any, **options: Any) -> Any:
        parsed.append(len(text))
        return loads(text, **options)

    def counted_dumps(value: Any, **options: Any) -> str:
        text = dumps(value, **options)
        written.append(len(text))
        return text

    monkeypatch.setattr(json, "loads", counted_loads)
    monkeypatch.setattr(json, "dumps", counted_dumps)
    ps.prepare(
        iter(["water flows"] * 3), tokenizer=trained, output=tmp_path / "out", progress=False
    )
    assert sum(size > large for size in parsed) == 1, parsed
    assert sum(size > large for size in written) <= 2, written  # the fingerprint, and for gigatoken
