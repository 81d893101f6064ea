"""Alignment of two tokenizations, case by case: what must be equal, what must not be, and what it
costs.
"""

import pickle
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import change_json, train_sentencepiece

from makers.tokenizers import tiny_tokenizer
from penstock import load_tokenizer
from penstock.core.errors import TokenizerError
from penstock.tokenizers import Aligner, Alignment, Tokenizer, align
from penstock.tokenizers.alignment import CONTROL, DIFFERENT, EQUIVALENT, EXACT


@pytest.fixture(scope="session")
def ours(trained: Path) -> Tokenizer:
    """Byte-level BPE."""
    return load_tokenizer(trained)


@pytest.fixture(scope="session")
def pieces(sentencepiece_file: Path) -> Tokenizer:
    """SentencePiece BPE: a space before the text, `<0x41>` for bytes."""
    return load_tokenizer(sentencepiece_file)


@pytest.fixture(scope="session")
def ranks(tiktoken_file: Path) -> Tokenizer:
    """Few merges: nearly bytes."""
    return load_tokenizer(tiktoken_file)


@pytest.fixture(scope="session")
def composing(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """`ours`, with NFC before it."""
    return load_tokenizer(
        change_json(trained, tmp_path_factory.mktemp("nfc"), normalizer={"type": "NFC"})
    )


@pytest.fixture(scope="session")
def word_pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """WordPiece, which forgets case, accents, whitespace and words that it does not know."""
    from tokenizers import Tokenizer as Builder
    from tokenizers import models, normalizers, pre_tokenizers

    words = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "the",
        "water",
        "##s",
        "flows",
        "turb",
        "##ine",
        ",",
        "cafe",
        "12",
        "##3",
        "in",
    ]
    builder = Builder(
        models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]")
    )
    builder.normalizer = normalizers.BertNormalizer()
    builder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    builder.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    path = tmp_path_factory.mktemp("wordpiece") / "tokenizer.json"
    builder.save(str(path))
    return load_tokenizer(path)


def texts_of(
    found: Alignment, student: Any, teacher: Any, tokenizers: tuple[Tokenizer, Tokenizer]
) -> list[Any]:
    """(kind, bytes on either side) of each chunk."""
    check(found)
    sides = [
        (tokenizer.byte_table, ids)
        for tokenizer, ids in zip(tokenizers, (student, teacher), strict=True)
    ]
    both = zip(
        found.kinds.tolist(),
        found.student_bounds.tolist(),
        found.teacher_bounds.tolist(),
        strict=True,
    )
    return [
        (
            kind,
            *(
                bytes(table.spell(ids[a:b]))
                for (table, ids), (a, b) in zip(sides, bounds, strict=True)
            ),
        )
        for kind, *bounds in both
    ]


def check(found: Alignment) -> None:
    """Ordered, disjoint, not empty, inside; the shares add up."""
    for bounds, size in (
        (found.student_bounds, found.num_student_tokens),
        (found.teacher_bounds, found.num_teacher_tokens),
    ):
        assert bounds.dtype == np.int32
        assert bounds.shape == (len(found.kinds), 2)
        assert (np.diff(bounds.ravel()) >= 0).all()
        assert (bounds[:, 0] < bounds[:, 1]).all()
        assert not len(bounds) or (bounds[0, 0] >= 0 and bounds[-1, 1] <= size)
    different = found.tokens_of(DIFFERENT) / max(found.num_student_tokens, 1)
    if found.num_student_tokens:
        assert found.coverage + different + found.orphaned == pytest.approx(1)
    assert found.one_to_one <= found.coverage


@pytest.mark.parametrize("student", ["ours", "pieces", "ranks", "composing"])
@pytest.mark.parametrize("teacher", ["ours", "pieces", "ranks", "composing"])
def test_every_text_is_aligned_in_full(
    student: str, teacher: str, hard_texts: list[str], request: pytest.FixtureRequest
) -> None:
    left, right = request.getfixturevalue(student), request.getfixturevalue(teacher)
    aligner = Aligner(left, right)
    for text in [
        *hard_texts,
        "a\r\nb\r\n",
        "\ufeffthe",
        "the\u00a0water",
        "   ",
        "\u3000水",
        "🤦🏼\u200d♂️ 水水",
        "   the  ▒",
    ]:
        found = aligner.align(left.encode(text), right.encode(text))
        check(found)
        assert found.method == "bytes"
        assert found.coverage == (1 if len(left.encode(text)) else 0)
        assert not (found.kinds != EXACT).any()
        np.testing.assert_array_equal(aligner.teacher_ids(left.encode(text)), right.encode(text))


def test_bos_on_one_side_is_one_orphan(ours: Tokenizer, pieces: Tokenizer) -> None:
    plain, other = ours.encode("the water 12"), pieces.encode("the water 12")
    with_bos = [ours.bos_id, *plain]
    found, without = align(with_bos, other, ours, pieces), align(plain, other, ours, pieces)
    assert found.orphaned == 1 / len(with_bos)
    np.testing.assert_array_equal(found.student_bounds, without.student_bounds + 1)
    np.testing.assert_array_equal(found.teacher_bounds, without.teacher_bounds)


def test_control_tokens_are_told_by_their_ids(ours: Tokenizer, pieces: Tokenizer) -> None:
    text = "<s> the <0x41>▁<|bos|></s>".replace("▁", " ")
    student = [ours.bos_id, *ours.encode(text), ours.eos_id]
    teacher = [pieces.bos_id, *pieces.encode(text), pieces.eos_id]
    found = align(student, teacher, ours, pieces)
    listed = texts_of(found, student, teacher, (ours, pieces))
    assert [kind for kind, *_ in listed if kind != EXACT] == [CONTROL, CONTROL]
    assert found.student_bounds[found.kinds == CONTROL].tolist() == [
        [0, 1],
        [len(student) - 1, len(student)],
    ]
    assert b"".join(left for _, left, _ in listed) == text.encode()
    assert found.coverage == 1


def test_told_control_pairs(ours: Tokenizer, pieces: Tokenizer) -> None:
    user, instruction = ours.special_tokens["<|user|>"], pieces.special_tokens["[INST]"]
    student = [user, *ours.encode("the water"), user]
    teacher = [instruction, *pieces.encode("the water"), instruction]
    assert align(student, teacher, ours, pieces).orphaned == 2 / len(student)
    told = Aligner(ours, pieces, control_pairs={user: instruction})
    assert told.align(student, teacher).kinds.tolist().count(CONTROL) == 2
    np.testing.assert_array_equal(told.teacher_ids(student), teacher)
    with pytest.raises(TokenizerError, match=f"control_pairs: id {ours.encode('w')[0]}"):
        Aligner(ours, pieces, control_pairs={int(ours.encode("w")[0]): instruction})


@pytest.mark.parametrize("text", ["水水", "the 水 flows", "🤦🏼\u200d♂️ the", "Zürich 水ёлка"])
def test_characters_that_are_cut_otherwise_do_not_drift(
    ours: Tokenizer, ranks: Tokenizer, text: str
) -> None:
    student, teacher = ours.encode(text + " the water"), ranks.encode(text + " the water")
    listed = texts_of(align(student, teacher, ours, ranks), student, teacher, (ours, ranks))
    assert all(kind == EXACT and left == right for kind, left, right in listed)
    assert b"".join(left for _, left, _ in listed).decode() == text + " the water"


def test_many_to_many_and_longer_than_four() -> None:
    student, teacher = (
        made([b"ab", b"cd", b"efghijk"]),
        made([b"a", b"bc", b"d", *(bytes([c]) for c in b"efghijk")]),
    )
    found = align([0, 1, 2], list(range(10)), student, teacher)
    assert found.student_bounds.tolist() == [[0, 2], [2, 3]]
    assert found.teacher_bounds.tolist() == [[0, 3], [3, 10]]


def made(entries: list[bytes]) -> Tokenizer:
    import base64
    import json

    lines = b"".join(
        base64.b64encode(entry) + b" %d\n" % rank for rank, entry in enumerate(entries)
    )
    encoding = json.dumps({"pattern": "(?s:.)", "special_tokens": {}}).encode()
    return Tokenizer("made", {"tokenizer.tiktoken": lines, "encoding.json": encoding})


@pytest.mark.parametrize(
    ("left", "right"), [("a\tb", "a\nb"), (" _x", "  x"), ("a ,b", "a,b"), ("the  of", "the of")]
)
def test_what_only_looks_alike_is_not_equal(
    ours: Tokenizer, ranks: Tokenizer, left: str, right: str
) -> None:
    student, teacher = ours.encode(left), ranks.encode(right)
    found = align(student, teacher, ours, ranks)
    for kind, one, other in texts_of(found, student, teacher, (ours, ranks)):
        assert kind == DIFFERENT or one == other
    assert found.coverage < 1
    assert found.method == "resync"


@pytest.mark.parametrize(
    "text", ["Zu\u0308rich the cafe\u0301", "e\u0301", "\u1112\u1161\u11ab the", "\u1e69 of"]
)
def test_decomposed_text_meets_its_composed_form(
    ours: Tokenizer, composing: Tokenizer, text: str
) -> None:
    decomposed = unicodedata.normalize("NFD", text)
    student, teacher = ours.encode(decomposed), composing.encode(decomposed)
    found = align(student, teacher, ours, composing)
    listed = texts_of(found, student, teacher, (ours, composing))
    assert found.method == "normalised"
    assert (found.coverage, found.orphaned) == (1, 0)
    assert EQUIVALENT in found.kinds
    for kind, left, right in listed:
        assert (left == right) == (kind == EXACT)
        assert unicodedata.normalize("NFC", left.decode()).encode() == right


def test_a_letter_never_meets_its_accented_form() -> None:
    """A student's token that ends between e and its accent is no end of a chunk, wherever the
    teacher's tokens end.
    """
    student, teacher = (
        made([b"cafe", "\u0301".encode(), b" x"]),
        made([b"caf", "é".encode(), b" x", b"\xc3", b"\xa9"]),
    )
    for ids in ([0, 1, 2], [0, 3, 4, 2]):
        found = align([0, 1, 2], ids, student, teacher)
        assert found.kinds.tolist() == [EQUIVALENT, EXACT]
        assert found.student_bounds.tolist() == [[0, 2], [2, 3]]


def test_text_that_differs_inside_a_normalised_one(ours: Tokenizer, composing: Tokenizer) -> None:
    left = unicodedata.normalize("NFD", "Zürich, the water flows into the gate of steel in Zürich")
    student = ours.encode(left)
    teacher = composing.encode(left.replace("flows", "falls"))
    found = align(student, teacher, ours, composing)
    assert found.method == "resync"
    assert (found.kinds == EQUIVALENT).sum() == 2
    assert (found.kinds == DIFFERENT).sum() == 1


@pytest.mark.parametrize("text", ["  the water", " the", "a\n the", "▒ the"])
def test_one_synthetic_space_is_taken_off(ours: Tokenizer, pieces: Tokenizer, text: str) -> None:
    for student, teacher in ((ours, pieces), (pieces, ours)):
        found = align(student.encode(text), teacher.encode(text), student, teacher)
        assert (found.method, found.coverage, found.orphaned) == ("bytes", 1, 0)


def test_a_space_after_each_control_token(ours: Tokenizer, pieces: Tokenizer) -> None:
    user, instruction = ours.special_tokens["<|user|>"], pieces.special_tokens["[INST]"]
    student = [user, *ours.encode("the"), user, *ours.encode(" of")]
    teacher = [instruction, *pieces.encode("the"), instruction, *pieces.encode(" of")]
    found = align(student, teacher, ours, pieces)
    assert found.orphaned == 2 / len(student)
    assert (found.kinds == EXACT).all()


def test_the_middle_of_a_document_begins_with_its_own_space(
    ours: Tokenizer, pieces: Tokenizer
) -> None:
    whole = pieces.encode("of the water flows")
    part = whole[int(np.flatnonzero(np.cumsum(pieces.byte_table.lengths[whole]) == 3)[0]) + 1 :]
    found = align(part, ours.encode(" the water flows"), pieces, ours)
    assert (found.method, found.coverage) == ("bytes", 1)
    aligner = Aligner(pieces, ours)
    assert ours.decode(aligner.teacher_ids(part, begins_text=False)) == " the water flows"
    assert ours.decode(aligner.teacher_ids(part)) == "the water flows"


def test_a_later_part_is_not_given_a_second_space(ours: Tokenizer, pieces: Tokenizer) -> None:
    """Where the teacher puts a space before every text, the text's own one need not be said
    again.
    """
    aligner = Aligner(ours, pieces)
    for text, due in (
        (" the water", "the water"),
        ("er flows", "er flows"),
        ("  the", " the"),
        (" ", " "),
    ):
        ids = aligner.teacher_ids(ours.encode(text), begins_text=False)
        np.testing.assert_array_equal(ids, pieces.encode(due))
        assert aligner.align(ours.encode(text), ids).coverage == 1
    np.testing.assert_array_equal(aligner.teacher_ids(ours.encode(" the")), pieces.encode(" the"))


def test_a_literal_block_costs_its_own_place_only(ours: Tokenizer, pieces: Tokenizer) -> None:
    text = "the water flows▁into the steel gate of the pump"
    student, teacher = pieces.encode(text), ours.encode(text)
    found = align(student, teacher, pieces, ours)
    listed = texts_of(found, student, teacher, (pieces, ours))
    assert found.method == "resync"
    assert sum(kind == DIFFERENT for kind, *_ in listed) == 1
    assert all(left == right for kind, left, right in listed[1:] if kind == EXACT)
    assert found.tokens_of(DIFFERENT) + round(found.orphaned * len(student)) <= 4


def test_a_large_difference_is_one_chunk(
    ours: Tokenizer, ranks: Tokenizer, texts: list[str]
) -> None:
    before, after = texts[0] * 3, " and then " + texts[1] * 3
    student, teacher = (
        ours.encode(before + "q" * 300 + after),
        ranks.encode(before + "z" * 200 + after),
    )
    found = align(student, teacher, ours, ranks)
    assert (found.kinds == DIFFERENT).sum() == 1
    kept = sum(
        len(left)
        for kind, left, _ in texts_of(found, student, teacher, (ours, ranks))
        if kind == EXACT
    )
    assert kept > len((before + after).encode()) - 12


def test_texts_with_nothing_in_common(ours: Tokenizer, ranks: Tokenizer) -> None:
    student = [*ours.encode("the water of steel" * 9), ours.eos_id]
    teacher = [*ranks.encode("QXJZ" * 50), ranks.eos_id]
    found = align(student, teacher, ours, ranks)
    assert found.kinds.tolist() == [DIFFERENT, CONTROL]
    assert found.coverage == 1 / len(student)


@pytest.mark.parametrize("kept", [1, 7, 20])
def test_a_shorter_side_leaves_the_others_tail(
    ours: Tokenizer, ranks: Tokenizer, texts: list[str], kept: int
) -> None:
    student, teacher = ours.encode(texts[0]), ranks.encode(texts[0])
    for left, right in ((student, teacher[:kept]), (student[:kept], teacher)):
        found = align(left, right, ours, ranks)
        listed = texts_of(found, left, right, (ours, ranks))
        assert all(kind == EXACT and one == other for kind, one, other in listed)
        shorter = min(
            len(bytes(ours.byte_table.spell(left))), len(bytes(ranks.byte_table.spell(right)))
        )
        assert sum(len(one) for _, one, _ in listed) > shorter - 12


def test_padding_that_is_eos_leaves_the_real_one(ours: Tokenizer, ranks: Tokenizer) -> None:
    """The caller takes padding off by its count; what is left of EOS is the document's."""
    text = "the water"
    padded = [*ours.encode(text), ours.eos_id, ours.eos_id, ours.eos_id]
    teacher = [*ranks.encode(text), ranks.eos_id]
    for student in (padded[:-2], padded):
        found = align(student, teacher, ours, ranks)
        assert found.kinds.tolist().count(CONTROL) == 1
        assert found.student_bounds[-1].tolist() == [
            len(ours.encode(text)),
            len(ours.encode(text)) + 1,
        ]
    left = [ours.eos_id, *padded]
    assert align(left, teacher, ours, ranks).kinds.tolist().count(CONTROL) == 1


@pytest.mark.parametrize("name", ["ours", "pieces", "ranks"])
def test_identical_tokenizers_give_every_token_itself(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = [*tokenizer.special_tokens.values(), *tokenizer.encode(" the 水 <s>"), tokenizer.eos_id]
    aligner = Aligner(tokenizer, tokenizer)
    found = aligner.align(ids, ids)
    assert aligner.is_identity
    assert (found.one_to_one, found.coverage, found.method) == (1, 1, "bytes")
    np.testing.assert_array_equal(found.student_bounds, found.teacher_bounds)
    np.testing.assert_array_equal(aligner.teacher_ids(ids), ids)
    known = [token_id for token_id in ids if token_id != tokenizer.unknown_id]
    assert aligner.align(known, known[:-2]).coverage == (len(known) - 2) / len(known)


def assert_linear(
    aligner: Aligner, make: Callable[[int], tuple[list[int], list[int]]], count: int
) -> None:
    """Ten times the text takes some ten times as long; a quadratic step would take a hundred times
    as long.
    """

    def seconds(count: int) -> float:
        student, teacher = make(count)
        found = []
        for _ in range(3):
            begun = time.process_time()
            aligned = aligner.align(student, teacher)
            found.append(time.process_time() - begun)
        check(aligned)
        return min(found)

    assert seconds(10 * count) < 40 * max(seconds(count), 1e-3)


@pytest.mark.parametrize("differing", [False, True])
def test_repeated_text_takes_linear_time(
    ours: Tokenizer, ranks: Tokenizer, differing: bool
) -> None:
    def repeated(count: int) -> tuple[list[int], list[int]]:
        half = "ab" * (count // 2)
        return ours.encode(half + half), ranks.encode(half + "b▁c" * differing + half)

    assert_linear(Aligner(ours, ranks), repeated, 20_000)


def test_adversarial_text_takes_linear_time(ours: Tokenizer, ranks: Tokenizer) -> None:
    """Differences every few bytes, and the same long run everywhere: each search is bounded."""

    def adversarial(count: int) -> tuple[list[int], list[int]]:
        return ours.encode(("a" * 40 + "b") * count), ranks.encode(("a" * 39 + "c") * count)

    assert_linear(Aligner(ours, ranks), adversarial, 300)


def test_broken_characters_at_the_ends_are_left_out(ours: Tokenizer, ranks: Tokenizer) -> None:
    ids = ranks.encode("水 the 水 water ё")
    text = "水 the 水 water ё".encode()
    whole = Aligner(ranks, ours)
    assert ranks.byte_table.spell(ids).tobytes() == text
    pieces = [bytes([byte]) for byte in text]
    single = made(sorted(set(pieces)))
    order = sorted(set(pieces))
    student = [order.index(piece) for piece in pieces[1:-1]]
    np.testing.assert_array_equal(
        Aligner(single, ours).teacher_ids(student), ours.encode(" the 水 water ")
    )
    np.testing.assert_array_equal(whole.teacher_ids(ids), ours.encode("水 the 水 water ё"))
    found = align(student, ours.encode(" the 水 water "), single, ours)
    assert found.coverage == pytest.approx(1 - 3 / len(student))


def test_control_tokens_of_the_text_that_the_teacher_gets(
    ours: Tokenizer, pieces: Tokenizer
) -> None:
    student = [
        ours.bos_id,
        *ours.encode("the"),
        ours.special_tokens["<|user|>"],
        *ours.encode(" of"),
        ours.eos_id,
    ]
    due = [
        pieces.bos_id,
        *pieces.encode("the of"),
        pieces.eos_id,
    ]  # each stretch would begin with a space of its own
    np.testing.assert_array_equal(Aligner(ours, pieces).teacher_ids(student), due)
    assert align(student, due, ours, pieces).orphaned == 1 / len(student)
    back = Aligner(pieces, ours).teacher_ids(due)
    np.testing.assert_array_equal(back, [ours.bos_id, *ours.encode("the of"), ours.eos_id])
    assert Aligner(ours, pieces).teacher_ids([]).tolist() == []


def test_words_without_a_byte_table(ours: Tokenizer, word_pieces: Tokenizer) -> None:
    text = "The Waters flows, in CAFÉ 123 turbine"
    student = ours.encode(text)
    teacher = [word_pieces.special_tokens["[CLS]"], *word_pieces.encode(text)]
    aligner = Aligner(ours, word_pieces)
    found = aligner.align(student, teacher)
    check(found)
    assert not aligner.is_exact
    assert (found.method, found.coverage) == ("strings", 1)
    assert set(found.kinds.tolist()) == {EQUIVALENT}
    np.testing.assert_array_equal(aligner.teacher_ids(student), teacher[1:])
    check(Aligner(word_pieces, ours).align(teacher, student))


def test_unknown_words_cost_their_own_place_only(ours: Tokenizer, word_pieces: Tokenizer) -> None:
    text = "the water zzz flows, qq in the qqq turbine ё of"
    student, teacher = ours.encode(text), word_pieces.encode(text)
    assert word_pieces.unknown_id in teacher
    found = align(student, teacher, ours, word_pieces)
    check(found)
    assert found.method == "strings"
    matched = [
        ours.decode(student[a:b]).strip()
        for a, b in found.student_bounds[found.kinds == EQUIVALENT].tolist()
    ]
    assert "".join(matched) == "thewaterflows,intheturbine"


def test_dynamic_programming_takes_no_more_than_its_band(
    word_pieces: Tokenizer, ours: Tokenizer
) -> None:
    def differing(count: int) -> tuple[list[int], list[int]]:
        return ours.encode("x water flows y " * count), word_pieces.encode(
            "flows q the water, " * count
        )

    assert_linear(Aligner(ours, word_pieces), differing, 100)


def test_a_lossy_sentencepiece(ours: Tokenizer, tmp_path: Path, texts: list[str]) -> None:
    lossy = load_tokenizer(
        train_sentencepiece(tmp_path / "nfkc", texts, normalization_rule_name="nmt_nfkc_cf")
    )
    text = "The  ﬁne WATER of Zürich"
    found = align(ours.encode(text), lossy.encode(text), ours, lossy)
    check(found)
    assert (found.method, found.coverage) == ("strings", 1)


def test_an_aligner_travels_without_its_tables(ours: Tokenizer, pieces: Tokenizer) -> None:
    aligner = Aligner(
        ours,
        pieces,
        control_pairs={ours.special_tokens["<|user|>"]: pieces.special_tokens["[INST]"]},
    )
    packed = pickle.dumps(aligner)
    assert (
        len(packed)
        < sum(len(part) for t in (ours, pieces) for part in t.source_bytes.values()) + 2000
    )
    student = [ours.special_tokens["<|user|>"], *ours.encode("the")]
    found = pickle.loads(packed).align(student, aligner.teacher_ids(student))
    assert found.coverage == 1


def test_the_trained_pair_of_other_texts(ours: Tokenizer, tmp_path: Path, texts: list[str]) -> None:
    larger = tiny_tokenizer(tmp_path / "larger", texts * 3, 700)
    for text in texts[:20]:
        found = align(ours.encode(text), larger.encode(text), ours, larger)
        assert found.coverage == 1
