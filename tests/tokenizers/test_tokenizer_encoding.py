"""Encoding: fast and own encoder agree, text stays text, a difference is found, workers agree."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import change_json, train_sentencepiece

from makers.tokenizers import added_token
from penstock import load_tokenizer
from penstock.core.errors import TokenizerError
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.fast import FastEncoder


def test_the_fast_encoder_is_used_and_agrees_with_the_own_one(
    exact: Tokenizer, hard_texts: list[str]
) -> None:
    assert (exact.encoder, exact.fallback_reason) == ("gigatoken", None)
    assert exact.check_encoder(hard_texts) is None
    assert exact.encoder == "gigatoken"


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_a_batch_is_the_texts_one_by_one(
    exact: Tokenizer, hard_texts: list[str], kind: Any
) -> None:
    batch = exact.encode_batch(pa.array(hard_texts, kind))
    assert (batch.values.dtype, batch.offsets.dtype) == (np.uint32, np.int64)
    for row, text in zip(batch, hard_texts, strict=True):
        assert row.tolist() == exact.encode(text).tolist()


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_a_slice_of_an_array_and_empty_arrays(
    exact: Tokenizer, hard_texts: list[str], kind: Any
) -> None:
    array = pa.array(hard_texts, kind)
    whole, part = exact.encode_batch(array), exact.encode_batch(array.slice(7, 20))
    assert [row.tolist() for row in part] == [row.tolist() for row in whole][7:27]
    assert (
        len(exact.encode_batch(array.slice(3, 0)))
        == len(exact.encode_batch(pa.array([], kind)))
        == 0
    )
    assert exact.encode_batch(pa.array(["", ""], kind)).offsets.tolist() == [0, 0, 0]


def test_text_never_becomes_a_control_token(exact: Tokenizer) -> None:
    controls = set(exact.special_tokens.values())
    for text in exact.special_tokens:
        assert not controls & set(exact.encode(f"a {text} b{text}").tolist())


def test_control_text_is_control_when_allowed(exact: Tokenizer) -> None:
    text, token_id = next((text, i) for text, i in exact.special_tokens.items() if text != "<unk>")
    ids = exact.encode(f"the pump{text}water", allow_control=True).tolist()
    assert ids.count(token_id) == 1
    assert (
        exact.encode("the pump", allow_control=True).tolist() == exact.encode("the pump").tolist()
    )


def test_nothing_is_added_around_a_text(exact: Tokenizer) -> None:
    ids = exact.encode("water").tolist()
    assert exact.bos_id not in ids
    assert exact.eos_id not in ids
    assert exact.encode("").tolist() == []


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=30), max_size=6))
def test_any_text_survives(trained: Path, texts: list[str]) -> None:
    tokenizer = load_tokenizer(trained)
    batch = tokenizer.encode_batch(pa.array(texts, pa.string()))
    assert [tokenizer.decode(row) for row in batch] == texts
    assert tokenizer.check_encoder(texts) is None


def test_added_words_and_spaces_stay_content_and_tags_do_not(trained: Path, tmp_path: Path) -> None:
    first = load_tokenizer(trained).vocab_size
    entries = [
        ("<think>", False),
        ("    ", False),
        ("Kaplanturbine", False),
        ("|||EMAIL|||", False),
        ("<|x|>", True),
    ]
    added = [
        added_token(text, first + place, special=special)
        for place, (text, special) in enumerate(entries)
    ]
    tokenizer = load_tokenizer(change_json(trained, tmp_path, added_tokens=added))
    assert tokenizer.special_tokens == {
        "<think>": first,
        "|||EMAIL|||": first + 3,
        "<|x|>": first + 4,
    }
    assert (tokenizer.vocab_size, tokenizer.encoder) == (first + 5, "gigatoken")
    assert tokenizer.encode("    ").tolist() == [first + 1]
    assert first + 2 in tokenizer.encode("a Kaplanturbine b").tolist()
    assert not {first, first + 3} & set(tokenizer.encode("<think>|||EMAIL|||").tolist())
    assert first in tokenizer.encode("<think>", allow_control=True).tolist()
    assert (
        tokenizer.check_encoder(["<think>    Kaplanturbine|||EMAIL|||    <|x|>", "x    y"]) is None
    )
    assert tokenizer.byte_table[first + 1] == b"    "
    assert tokenizer.byte_table[first] == b""


def test_user_defined_pieces_of_spaces_are_left_to_sentencepiece(
    tmp_path: Path, texts: list[str]
) -> None:
    tokenizer = load_tokenizer(
        train_sentencepiece(tmp_path / "runs", texts, user_defined_symbols=["▁▁▁", "<b>"])
    )
    assert "treats user-defined pieces differently" in str(tokenizer.fallback_reason)
    assert "<b>" in tokenizer.special_tokens
    ids = tokenizer.encode("the   water<b>").tolist()
    assert tokenizer.special_tokens["<b>"] not in ids
    assert b"   " in [tokenizer.byte_table[token_id] for token_id in ids]
    assert tokenizer.decode(ids) == "the   water<b>"


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_a_merge_or_word_that_spells_a_control_entry_is_not_made(
    trained: Path, tmp_path: Path, ignore_merges: bool
) -> None:
    model = json.loads((trained / "tokenizer.json").read_text())["model"]
    size = len(model["vocab"])
    merges = [["<", "|"], ["<|", ">"], *model["merges"]]
    model |= {
        "merges": merges,
        "vocab": model["vocab"] | {"<|": size, "<|>": size + 1},
        "ignore_merges": ignore_merges,
    }
    added = [added_token("<|>", size + 1, special=False)]
    tokenizer = load_tokenizer(change_json(trained, tmp_path, model=model, added_tokens=added))
    due = [size, tokenizer.encode(">")[0]]
    assert tokenizer.encode("<|>").tolist() == due
    assert tokenizer.check_encoder(["<|>", "a <|> b"]) is None
    assert tokenizer.encode("<|>", allow_control=True).tolist() == [size + 1]
    assert tokenizer.encoder == "gigatoken"


class WrongEncoder:
    """Encodes everything as id 7."""

    def encode(self, text: str) -> np.ndarray[Any, Any]:
        return np.array([7], np.uint32)

    def encode_batch(self, texts: Any, parallel: bool) -> Any:
        import awkward as ak

        return ak.Array(
            ak.contents.ListOffsetArray(
                ak.index.Index64(np.arange(len(texts) + 1)), _sevens(len(texts))
            )
        )


def _sevens(count: int) -> Any:
    import awkward as ak

    return ak.contents.NumpyArray(np.full(count, 7, np.uint32))


def test_a_wrong_fast_encoder_is_found_and_left(trained: Path) -> None:
    tokenizer, right = load_tokenizer(trained), load_tokenizer(trained)
    tokenizer.__dict__["_fast"] = FastEncoder(backend=WrongEncoder())
    reason = tokenizer.check_encoder(["water flows"])
    assert reason is not None
    assert "gigatoken and tokenizers disagree on 'water flows', from token 0" in reason
    for either in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert (either.encoder, either.fallback_reason) == ("tokenizers", reason)
        assert either.encode("water flows").tolist() == right.encode("water flows").tolist()


def test_what_gigatoken_cannot_do_penstock_does(
    trained: Path, tmp_path: Path, hard_texts: list[str]
) -> None:
    pieces = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Punctuation", "behavior": "Isolated"}, _byte_level()],
    }
    tokenizer = load_tokenizer(change_json(trained, tmp_path, pre_tokenizer=pieces))
    batch = tokenizer.encode_batch(pa.array(hard_texts))
    assert (tokenizer.encoder, tokenizer.fallback_reason) == ("penstock", None)
    assert tokenizer.check_encoder(hard_texts) is None
    assert [tokenizer.decode(row) for row in batch] == hard_texts


def _byte_level() -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def test_a_pickled_tokenizer_needs_no_files_and_agrees(
    exact: Tokenizer, hard_texts: list[str]
) -> None:
    copy = pickle.loads(pickle.dumps(exact))
    assert (copy.fingerprint, copy.special_tokens, copy.name) == (
        exact.fingerprint,
        exact.special_tokens,
        exact.name,
    )
    array = pa.array(hard_texts)
    assert np.array_equal(copy.encode_batch(array).values, exact.encode_batch(array).values)


def test_what_is_no_array_of_strings_is_refused(trained: Path) -> None:
    tokenizer = load_tokenizer(trained)
    with pytest.raises(TokenizerError, match="1 of 2 texts are null"):
        tokenizer.encode_batch(pa.array(["a", None]))
    with pytest.raises(TokenizerError, match=r"int64.*pyarrow.*strings"):
        tokenizer.encode_batch(pa.array([1]))
    with pytest.raises(TokenizerError, match="texts are list, expected"):
        tokenizer.encode_batch(["a"])
    with pytest.raises(TokenizerError, match=r"character 1.*U\+D83D"):
        tokenizer.encode("a\ud83d")


def test_decoding_shows_control_tokens_and_broken_bytes(trained: Path) -> None:
    tokenizer = load_tokenizer(trained)
    half = tokenizer.encode("水").tolist()
    assert (
        tokenizer.decode([0, *tokenizer.encode("the water").tolist(), 1])
        == "<|bos|>the water<|eos|>"
    )
    assert tokenizer.decode([]) == ""
    if len(half) > 1:
        assert "\ufffd" in tokenizer.decode(half[:-1])


@pytest.mark.parametrize("ids", [[-1], [0, -100], [100_000_000]])
def test_ids_outside_the_vocabulary_are_refused(exact: Tokenizer, ids: list[int]) -> None:
    with pytest.raises(TokenizerError, match=f"id {ids[-1]} .*of {exact.vocab_size}"):
        exact.decode(ids)
    with pytest.raises(TokenizerError, match=f"id {ids[-1]} is outside the vocabulary"):
        exact.token_ends("", ids)
