"""Merges that stay the text of their file: the same as those that json.loads gives."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import load_tokenizer
from penstock.core.json_values import JsonObject
from penstock.core.large_json import canonical_json
from penstock.tokenizers import written_merges
from penstock.tokenizers.encoder import load_encoder
from penstock.tokenizers.written_merges import (
    WrittenMerges,
    dump_tokenizer_json,
    parse_tokenizer_json,
)
from tokenizers import Tokenizer as Encoder

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
MERGES = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=12)


def _file(merges: Any) -> JsonObject:
    return {"version": "1.0", "added_tokens": [], "model": {"vocab": {"a": 0}, "merges": merges}}


@settings(max_examples=150, deadline=None)
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
