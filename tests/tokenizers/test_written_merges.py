"""A vocabulary and merges that stay the text of their file: the same as json.loads gives."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import load_tokenizer
from penstock.core.json_values import JsonObject
from penstock.core.large_json import canonical_json
from penstock.tokenizers import written_merges, written_vocabulary
from penstock.tokenizers.encoder import encoder_of_texts, load_encoder
from penstock.tokenizers.huggingface import HuggingFaceVocabulary
from penstock.tokenizers.written_merges import (
    WrittenMerges,
    dump_tokenizer_json,
    parse_tokenizer_json,
)
from penstock.tokenizers.written_vocabulary import WrittenVocabulary
from tokenizers import Tokenizer as Encoder
from tokenizers import models, normalizers, trainers

ODD = [
    '"',
    "\\",
    "\n",
    "\r",
    '",\n        "',
    '"\n      ],\n      [',
    '"merges": [',
    "],[",
    "é▁😀",
    "\x7f",
]
TOKENS = st.one_of(st.sampled_from(ODD), st.text(st.characters(codec="utf-8"), max_size=4))
VOCABULARY = st.dictionaries(TOKENS, st.integers(0, 2**31 - 1), min_size=1, max_size=12)
MERGES = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=12)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are read as large ones are."""
    monkeypatch.setattr(written_merges, "LARGE", 0)


def _file(merges: Any) -> JsonObject:
    return {"version": "1.0", "added_tokens": [], "model": {"vocab": {"a": 0}, "merges": merges}}


RELAXED = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@RELAXED
@given(merges=MERGES, left_out=st.sets(TOKENS), ascii=st.booleans(), part=st.integers(1, 90))
def test_written_merges_are_those_of_the_json(
    merges: list[tuple[str, str]], left_out: set[str], ascii: bool, part: int
) -> None:
    content = json.dumps(_file(merges), indent=2, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written_merges, "_PART", part)
        parsed = parse_tokenizer_json(content)
        found = parsed["model"]["merges"]
        assert isinstance(found, WrittenMerges)
        assert list(found) == merges
        assert (len(found), found[0], found[-1], found[1:]) == (
            len(merges),
            merges[0],
            merges[-1],
            merges[1:],
        )
        assert json.loads(dump_tokenizer_json(parsed)) == json.loads(content)
        plain = json.dumps(json.loads(content), sort_keys=True, separators=(",", ":"))
        assert b"".join(canonical_json(parsed)) == plain.encode()
        kept = [merge for merge in merges if "".join(merge) not in left_out]
        less = found.without(left_out)
        assert bool(less) == bool(kept)
        assert list(less) == kept
        assert len(less) == len(kept)
        parsed["model"]["merges"] = less
        assert json.loads(dump_tokenizer_json(parsed))["model"]["merges"] == [*map(list, kept)]


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(_file([["a", "b"]])),
        json.dumps(_file([["a", "b"]]), indent=1),
        json.dumps(_file([["a", "b"], ["a", "b", "c"]]), indent=2),
        json.dumps(_file([["a", "b"], [1, [2]], 3]), indent=2),
        json.dumps(_file(["a b"]), indent=2),
        json.dumps(_file([]), indent=2),
        json.dumps({"other": {"merges": [["a", "b"]]}, "model": {"merges": []}}, indent=2),
        json.dumps({"other": {"merges": [["a", "b"]]}}, indent=2),
        json.dumps([{"merges": [["a", "b"]]}], indent=2),
    ],
)
def test_another_layout_is_read_as_json(content: str) -> None:
    parsed = parse_tokenizer_json(content.encode())
    assert parsed == json.loads(content)
    assert json.loads(json.dumps(parsed)) == parsed


@pytest.mark.parametrize("end", ['"c" "d"', '"c", "d"]', '"c", d'])
def test_merges_that_are_no_json_are_refused(end: str) -> None:
    content = json.dumps(_file([["a", "b"], ["c", "d"]]), indent=2)
    broken = content.replace('"c",\n        "d"', end)
    assert broken != content
    with pytest.raises(json.JSONDecodeError, match=r"delimiter|Expecting"):
        parse_tokenizer_json(broken.encode())


def test_files_of_the_tokenizers_package_have_the_layout(trained: Path) -> None:
    content = (trained / "tokenizer.json").read_bytes()
    parsed, plain = parse_tokenizer_json(content), json.loads(content)
    assert isinstance(parsed["model"]["merges"], WrittenMerges)
    assert load_encoder(parsed).to_str() == Encoder.from_str(json.dumps(plain)).to_str()


def test_the_layout_of_a_file_changes_nothing(trained: Path, tmp_path: Path) -> None:
    content = json.loads((trained / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    written, plain = load_tokenizer(trained), load_tokenizer(tmp_path)
    assert written.fingerprint == plain.fingerprint
    assert written.check_encoder(["water flows", "<|bos|> 1"]) is None
    assert written.encode("water flows").tolist() == plain.encode("water flows").tolist()


@RELAXED
@given(vocabulary=VOCABULARY, others=st.lists(TOKENS), ascii=st.booleans())
def test_a_written_vocabulary_is_that_of_the_json(
    vocabulary: dict[str, int], others: list[str], ascii: bool
) -> None:
    whole = {"model": {"vocab": vocabulary, "merges": [("a", "b")]}}
    content = json.dumps(whole, indent=2, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written_vocabulary, "_PART", 2)
        parsed = parse_tokenizer_json(content)
        found = parsed["model"]["vocab"]
        assert isinstance(found, WrittenVocabulary)
        assert list(found.items()) == list(vocabulary.items())
        assert list(found.values()) == list(vocabulary.values())
        for text in [*vocabulary, *others, "\ud800"]:
            assert (text in found, found.get(text)) == (text in vocabulary, vocabulary.get(text))
        assert json.loads(dump_tokenizer_json(parsed)) == json.loads(content)
        plain = json.dumps(json.loads(content), sort_keys=True, separators=(",", ":"))
        assert b"".join(canonical_json(parsed)) == plain.encode()


@pytest.mark.parametrize(
    "entry",
    ['"a": 1', '"b": 1.0', '"b": -1', '"b": 4294967296', '"b": true', '"b": "1"', '"\\ud800": 1'],
)
def test_an_unusual_vocabulary_is_read_as_json(entry: str) -> None:
    text = json.dumps(_file([["a", "b"]]), indent=2).replace('"a": 0', f'"a": 0,\n      {entry}')
    parsed = parse_tokenizer_json(text.encode())
    assert isinstance(parsed["model"]["vocab"], dict)
    assert parsed == json.loads(text)


def _sentencepiece(tmp_path: Path) -> Path:
    """A BPE of characters with byte fallback, which cuts at nothing, as Gemma's is written."""
    texts = ["water flows down", "the penstock holds water", "über 😀 flows", "a\nb\n\nc"] * 20
    trained = Encoder(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    special = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=380, special_tokens=special, show_progress=False)
    )
    content = json.loads(trained.to_str())
    content["added_tokens"] = content["added_tokens"][:2]
    content["added_tokens"].append(
        {**content["added_tokens"][0], "id": content["model"]["vocab"]["\n"], "content": "\n"}
        | {"special": False}
    )
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False))
    return path


TEXTS = ["water flows", "", "über 😀 the\n\nwater", "日本 a▁b", "penstock\tholds<bos>", "a" * 50]


def test_the_check_needs_only_tokens_that_its_texts_may_have(tmp_path: Path) -> None:
    vocabulary = load_tokenizer(_sentencepiece(tmp_path))._vocabulary
    assert isinstance(vocabulary, HuggingFaceVocabulary)
    assert vocabulary.kind == "SentencePiece BPE"
    for texts in [TEXTS, *([text] for text in TEXTS)]:
        small = encoder_of_texts(vocabulary._scrubbed_json, texts)
        own = load_encoder(vocabulary._scrubbed_json)
        assert own.get_vocab_size() == vocabulary.size
        for text in texts:
            expected = own.encode(text, add_special_tokens=False).ids
            assert small.encode(text, add_special_tokens=False).ids == expected
    assert (
        encoder_of_texts(vocabulary._scrubbed_json, ["x"]).get_vocab_size() < own.get_vocab_size()
    )


def test_preparing_makes_no_object_of_each_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(_sentencepiece(tmp_path))
    passes = []
    for kind in (WrittenVocabulary, WrittenMerges):
        monkeypatch.setattr(kind, "__iter__", lambda self: passes.append(type(self)) or iter(()))
    ps.prepare(
        iter(filter(None, TEXTS)), tokenizer=tokenizer, output=tmp_path / "out", progress=False
    )
    assert (tokenizer.encoder, passes) == ("gigatoken", [])
