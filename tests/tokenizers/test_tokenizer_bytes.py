"""The byte table, and where each token ends: exact, or an error that says why not."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import change_json, train_sentencepiece

from penstock import load_tokenizer
from penstock.core.errors import TokenizerError
from penstock.core.ragged import Ragged
from penstock.tokenizers import ByteTable, Tokenizer
from penstock.tokenizers.token_ends import token_ends


def slow_ends(tokenizer: Tokenizer, text: str, ids: list[int]) -> list[int]:
    """Token by token: the bytes so far, without the space that was put before the text."""
    whole, ends = b"", []
    for token_id in ids:
        whole += tokenizer.byte_table[token_id]
        ends.append(len(whole))
    extra = len(whole) - len(text.encode())
    assert whole[extra:] == text.encode()
    assert whole[:extra] in (b"", b" ")
    return [max(end - extra, 0) for end in ends]


def test_ends_are_those_of_counting_bytes(exact: Tokenizer, hard_texts: list[str]) -> None:
    array = pa.array(hard_texts)
    ids = exact.encode_batch(array)
    batch = exact.token_ends_batch(array, ids)
    for row, text in enumerate(hard_texts):
        due = slow_ends(exact, text, ids[row].tolist())
        assert batch[row].tolist() == due
        assert (
            exact.token_ends(text, ids[row]).tolist()
            == exact.token_ends(text.encode(), ids[row]).tolist()
            == due
        )
        assert not due or due[-1] == len(text.encode())


def test_ends_of_a_slice(exact: Tokenizer, hard_texts: list[str]) -> None:
    array = pa.array(hard_texts).slice(9, 11)
    ends = exact.token_ends_batch(array, exact.encode_batch(array))
    assert [row.tolist() for row in ends] == [
        exact.token_ends(t.as_py(), exact.encode(t.as_py())).tolist() for t in array
    ]
    assert (
        len(exact.token_ends_batch(array.slice(0, 0), exact.encode_batch(array.slice(0, 0)))) == 0
    )


def test_control_tokens_take_no_bytes(trained: Path) -> None:
    tokenizer = load_tokenizer(trained)
    ids = [tokenizer.bos_id, *tokenizer.encode("the water").tolist(), tokenizer.eos_id]
    ends = tokenizer.token_ends("the water", ids).tolist()
    assert (ends[0], ends[-2:]) == (0, [9, 9])


def test_every_byte_is_in_the_table_once(exact: Tokenizer) -> None:
    table = exact.byte_table
    single = [bytes([byte]) for byte in range(256)]
    entries = [table[token_id] for token_id in range(len(table))]
    assert len(table) == exact.vocab_size
    assert set(single) <= set(entries)
    assert all(
        table[token_id] == b"" and table.is_control[token_id]
        for token_id in exact.special_tokens.values()
    )
    assert table.lengths.tolist() == [len(entry) for entry in entries]
    with pytest.raises(TokenizerError, match=f"id {len(table)} .*of {len(table)} ids"):
        table[len(table)]


@settings(deadline=None)
@given(entries=st.lists(st.binary(max_size=4), min_size=1, max_size=6), data=st.data())
def test_spelling_is_joining(entries: list[bytes], data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(entries) - 1), max_size=12))
    spelled = ByteTable(entries).spell(ids)
    assert spelled.tobytes() == b"".join(entries[token_id] for token_id in ids)


def test_a_literal_block_is_refused(sentencepiece_file: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_file)
    array = pa.array(["the water", "the▁water"])
    with pytest.raises(TokenizerError, match=r"row.*1.*spell.*literal"):
        tokenizer.token_ends_batch(array, tokenizer.encode_batch(array))


def test_text_that_is_not_nfc_is_refused(trained: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(change_json(trained, tmp_path, normalizer={"type": "NFC"}))
    assert (tokenizer.normalization, tokenizer.encoder) == ("NFC", "gigatoken")
    assert tokenizer.token_ends("Zürich", tokenizer.encode("Zürich"))[-1] == 7
    with pytest.raises(TokenizerError, match=r"NFC form.*unicodedata.normalize\('NFC'"):
        tokenizer.token_ends("Zu\u0308rich", tokenizer.encode("Zu\u0308rich"))


@pytest.mark.parametrize("text", ["the wate", "the waterr", " the water", "The water", ""])
def test_ids_of_another_text_are_refused(exact: Tokenizer, text: str) -> None:
    ids = exact.encode("the water")
    if exact.kind == "SentencePiece BPE" and text == " the water":
        return  # the space it puts before a text: both texts have these ids
    with pytest.raises(TokenizerError, match=r"spell.*bytes.*text.*byte"):
        exact.token_ends(text, ids)


def test_a_leading_space_is_handled_only_where_it_is_one() -> None:
    table = ByteTable([b"a", b" ", b"b", None])

    def ends(text: bytes, ids: list[int]) -> list[int]:
        whole = np.array([0, len(text)])
        return token_ends(
            table,
            Ragged(np.frombuffer(text, np.uint8), whole),
            Ragged(np.array(ids), np.array([0, len(ids)])),
        ).values.tolist()

    assert ends(b"ab", [1, 0, 2]) == [0, 1, 2]
    assert ends(b" ab", [1, 0, 2]) == [1, 2, 3]
    assert ends(b"", [1]) == [0]
    assert ends(b"a", [3, 1, 0, 3]) == [0, 0, 1, 1]
    with pytest.raises(TokenizerError, match="from byte 0 on"):
        ends(b"ab", [2, 0, 2])
    with pytest.raises(TokenizerError, match="1 texts, but ids of 2"):
        token_ends(
            table,
            Ragged(np.zeros(0, np.uint8), np.array([0, 0])),
            Ragged(np.zeros(0, np.int64), np.array([0, 0, 0])),
        )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase changes text"),
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [{"type": "NFC"}, {"type": "NFKC"}],
                }
            },
            "NFKC changes text",
        ),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, "has no byte fallback"),
    ],
)
def test_no_table_says_why(
    trained: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    tokenizer = load_tokenizer(change_json(trained, tmp_path, **changes))
    with pytest.raises(TokenizerError, match=f"no exact byte table: .*{reason}"):
        _ = tokenizer.byte_table


def test_no_table_for_models_that_lose_text(tmp_path: Path, texts: list[str]) -> None:
    lossy = train_sentencepiece(tmp_path / "nfkc", texts, normalization_rule_name="nmt_nfkc")
    with pytest.raises(TokenizerError, match=r"normalises.*\(nmt_nfkc.*spaces\)"):
        _ = load_tokenizer(lossy).byte_table
    unigram = load_tokenizer(
        train_sentencepiece(
            tmp_path / "uni", texts, model_type="unigram", byte_fallback=False, vocab_size=60
        )
    )
    assert (unigram.kind, unigram.encoder) == ("Unigram", "sentencepiece")
    with pytest.raises(TokenizerError, match="no byte fallback, so <unk> loses text"):
        _ = unigram.byte_table
    assert unigram.decode(unigram.encode("the water")) == "the water"
