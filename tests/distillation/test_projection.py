"""The projection of a student's vocabulary on a teacher's, against a slow twin and on cases with
known answers.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.tokenizers import tiny_tokenizer
from penstock import load_tokenizer
from penstock.core.errors import ConfigError, FormatError, OutputError
from penstock.learn.distillation.projection import Projection, project
from penstock.learn.distillation.projection_cells import Cells, encode_inside, heaviest
from penstock.tokenizers import Tokenizer

TEXTS = [
    "the pump lifts water into the turbine, and the gate holds it back",
    "Zürich 12 345 水 don't stop\n\ty = x 鳥鳩鳥鳩",
]
MORE = [
    "a turbine turns water into light; the gatekeeper thinks of Zürich and of 水, 345 times",
    "def f(x): return x",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("projection")


@pytest.fixture(scope="module")
def student(folder: Path) -> Tokenizer:
    return tiny_tokenizer(folder / "student", TEXTS * 4, 300)


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Tokenizer:
    return tiny_tokenizer(folder / "teacher", MORE * 4, 340, ["<|user|>"])


@pytest.fixture(scope="module")
def sentencepiece(folder: Path) -> Tokenizer:
    """A SentencePiece BPE with byte fallback, so that `A` is spelled by two ids; puts a space
    before a text.
    """
    from sentencepiece import SentencePieceTrainer

    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:1] * 4 + MORE[:1] * 4),
        model_prefix=str(folder / "spm"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return load_tokenizer(folder / "spm.model")


def spelling(tokenizer: Tokenizer) -> list[bytes]:
    return [tokenizer.byte_table[token] for token in range(tokenizer.vocab_size)]


def row(projection: Projection, token: int) -> dict[int, float]:
    cells = zip(projection.indices[token].tolist(), projection.weights[token].tolist(), strict=True)
    return {
        teacher_id: pytest.approx(weight, abs=1e-6)
        for teacher_id, weight in cells
        if teacher_id >= 0
    }


def slow_projection(
    student: Tokenizer, teacher: Tokenizer, top_k: int, decay: float, reverse: bool
) -> list[dict]:
    """Rows as dictionaries, token by token: for byte-level tokenizers, whose `encode` puts no space
    before a text.
    """
    ours, theirs = spelling(student), spelling(teacher)
    rows: list[dict[int, float]] = [{} for _ in ours]

    def pieces_of(data: bytes, tokenizer: Tokenizer) -> list[tuple[int, float]]:
        try:
            ids = tokenizer.encode(data.decode()).tolist()[:4] if data else []
        except UnicodeDecodeError:
            return []
        total = sum(decay**place for place in range(len(ids)))
        return [(token, decay**place / total) for place, token in enumerate(ids)]

    for token, data in enumerate(ours):
        for piece, weight in pieces_of(data, teacher):
            rows[token][piece] = rows[token].get(piece, 0.0) + weight
    for token, data in enumerate(theirs):
        for piece, weight in pieces_of(data, student) if reverse else []:
            rows[piece][token] = rows[piece].get(token, 0.0) + weight
    for token, data in enumerate(ours):
        if data and data in theirs:
            rows[token] = {theirs.index(data): 1.0}
    rows[student.bos_id], rows[student.eos_id] = {teacher.bos_id: 1.0}, {teacher.eos_id: 1.0}
    for token, found in enumerate(rows):
        best = sorted(found.items(), key=lambda cell: (-cell[1], cell[0]))[:top_k]
        rows[token] = {piece: weight / sum(weight for _, weight in best) for piece, weight in best}
    return rows


@pytest.mark.parametrize("top_k", [1, 3, 4])
@pytest.mark.parametrize("reverse", [True, False])
def test_projection_is_its_slow_twin(
    student: Tokenizer, teacher: Tokenizer, top_k: int, reverse: bool
) -> None:
    for one, other in ((student, teacher), (teacher, student)):
        found = project(one, other, top_k=top_k, decay=0.3, reverse=reverse)
        expected = slow_projection(one, other, top_k, 0.3, reverse)
        assert [row(found, token) for token in range(one.vocab_size)] == expected


@pytest.mark.parametrize(
    "pair", ["student teacher", "teacher sentencepiece", "sentencepiece student"]
)
def test_rows_sum_to_one_or_are_flagged_empty(pair: str, request: pytest.FixtureRequest) -> None:
    one, other = (request.getfixturevalue(name) for name in pair.split())
    found = project(one, other)
    sums = found.weights.astype(np.float64).sum(1)
    assert (found.weights >= 0).all()
    np.testing.assert_allclose(sums[~found.empty], 1, atol=1e-6)
    assert (sums[found.empty] == 0).all()
    assert (found.indices[found.empty] == -1).all()
    assert ((found.indices >= 0) == (found.weights > 0)).all()
    assert (np.diff(found.weights, axis=1) <= 0).all()
    assert found.empty[one.pad_id or 0] or not found.empty.any()
    ours, theirs = spelling(one), spelling(other)
    for token in range(one.vocab_size):
        if ours[token] in theirs and ours[token]:
            assert theirs[found.indices[token, 0]] == ours[token]
            assert found.weights[token, 0] == 1


def test_weights_of_pieces(student: Tokenizer, teacher: Tokenizer) -> None:
    """2 pieces: .909 and .091; 3: .9009, .0901, .0090 (NeMo-RL's); a fourth and more on the same
    way.
    """
    found = project(student, teacher, reverse=False)
    counts = (found.indices >= 0).sum(1)
    expected = {2: [1 / 1.1, 0.1 / 1.1], 3: [1 / 1.11, 0.1 / 1.11, 0.01 / 1.11]}
    for count, weights in expected.items():
        rows = found.weights[(counts == count) & ~found.exact]
        assert len(rows)
        assert np.isclose(rows[:, :count], weights, atol=1e-6).all(1).any()


def test_pieces_spell_the_token_inside_a_text(teacher: Tokenizer, sentencepiece: Tokenizer) -> None:
    """No synthetic space before a token, none lost that is its own, and nothing for halves of
    characters.
    """
    spellings = [
        b"gate",
        b" gate",
        b"  gate",
        b"\n",
        b" ",
        b"x\ty",
        "水".encode()[:2],
        b"",
        "▁gate".encode(),
        "水".encode(),
    ]
    for tokenizer in (teacher, sentencepiece):
        found = encode_inside(tokenizer, spellings)
        for data, ids in zip(spellings, found, strict=True):
            assert tokenizer.byte_table.spell(ids).tobytes() in (data, b"")
        assert [len(ids) > 0 for ids in found] == [
            True, True, True, True, True, True, False, False, tokenizer is teacher, True,
        ]  # fmt: skip


def test_of_two_ids_with_the_same_bytes_the_written_one_counts(
    student: Tokenizer, sentencepiece: Tokenizer
) -> None:
    """SentencePiece has a piece `a` and a byte token of it, with the lower id, that encoding never
    writes.
    """
    ids = [token for token, data in enumerate(spelling(sentencepiece)) if data == b"a"]
    written = int(encode_inside(sentencepiece, [b"a"])[0][0])
    assert len(ids) == 2
    assert written == max(ids)
    ours = spelling(student).index(b"a")
    assert row(project(student, sentencepiece), ours) == {written: 1.0}
    back = project(sentencepiece, student)
    for token in ids:
        assert row(back, token) == {ours: 1.0}
        assert back.exact[token] == (token == written)
    assert [written, ours] in back.pairs().tolist()


def test_control_tokens_go_by_part(student: Tokenizer, teacher: Tokenizer) -> None:
    user = teacher.special_tokens["<|user|>"]
    found = project(teacher, student)
    assert row(found, teacher.bos_id) == {student.bos_id: 1.0}
    assert row(found, teacher.eos_id) == {student.eos_id: 1.0}
    assert found.empty[user]
    assert found.empty[teacher.pad_id]
    reported = project(teacher, student, control_pairs={user: student.eos_id})
    assert row(reported, user) == {student.eos_id: 1.0}
    with pytest.raises(ConfigError, match=r"student id 9999 is outside"):
        project(student, teacher, control_pairs={9999: 1})


def test_a_control_entry_is_not_the_text_that_it_is_written_as(
    student: Tokenizer, folder: Path
) -> None:
    """Ids decide, not the look of strings: ` the` as control text is not the word, on neither
    side.
    """
    controls = tiny_tokenizer(folder / "looks", MORE * 4, 300, [" the", "<0x41>", "<s>"])
    word = spelling(student).index(b" the")
    named = [controls.special_tokens[text] for text in (" the", "<0x41>", "<s>")]
    found = project(student, controls)
    assert not np.isin(found.indices, named).any()
    assert not found.exact[word]
    assert not found.empty[word]
    assert project(controls, student).empty[named].all()


def test_the_same_tokenizer_is_the_identity(student: Tokenizer) -> None:
    found = project(student, student)
    of_text = np.flatnonzero(student.byte_table.lengths > 0)
    assert (found.indices[of_text, 0] == of_text).all()
    assert (found.weights[of_text, 0] == 1).all()
    assert found.exact[of_text].all()


def test_pairs_are_one_to_one(student: Tokenizer, teacher: Tokenizer) -> None:
    found = project(student, teacher)
    ours, theirs = spelling(student), spelling(teacher)
    strict = found.pairs()
    assert sorted(strict[:, 1].tolist()) == np.unique(strict[:, 1]).tolist()
    assert {(a, b) for a, b in strict.tolist() if ours[a]} == {
        (a, theirs.index(data)) for a, data in enumerate(ours) if data and data in theirs
    }
    loose = found.pairs(0.6)
    assert len(np.unique(loose[:, 0])) == len(np.unique(loose[:, 1])) == len(loose) >= len(strict)
    assert {tuple(pair) for pair in strict.tolist()} <= {tuple(pair) for pair in loose.tolist()}
    assert (np.diff(loose[:, 0]) > 0).all()
    with pytest.raises(ConfigError, match=r"threshold.*above.*0.*most.*1.*got.*1.5"):
        found.pairs(1.5)


def made_up(indices: list[list[int]], weights: list[list[float]], exact: list[bool]) -> Projection:
    return Projection(
        indices=np.array(indices, np.int32),
        weights=np.array(weights, np.float32),
        exact=np.array(exact),
        student_fingerprint="a",
        teacher_fingerprint="b",
        student_size=len(indices),
        teacher_size=9,
    )


def test_the_heaviest_student_has_the_pair() -> None:
    found = made_up(
        [[5, 6], [5, 7], [5, -1], [6, -1], [-1, -1]],
        [[0.7, 0.3], [0.8, 0.2], [1, 0], [1, 0], [0, 0]],
        [False, False, False, True, False],
    )
    assert found.pairs(0.6).tolist() == [[2, 5], [3, 6]]
    assert found.pairs().tolist() == [[3, 6]]


def test_no_common_vocabulary_is_an_error() -> None:
    """Not an empty set, with which a run would train on nothing."""
    found = made_up([[5, 6], [-1, -1]], [[0.55, 0.45], [0, 0]], [False, False])
    for threshold in (1.0, 0.6):
        with pytest.raises(ConfigError, match="have no token in common"):
            found.pairs(threshold)


def test_embeddings_fill_empty_rows(student: Tokenizer, teacher: Tokenizer) -> None:
    chance = np.random.default_rng(0)
    ours, theirs = (
        chance.normal(size=(student.vocab_size, 8)),
        chance.normal(size=(teacher.vocab_size, 8)),
    )
    plain = project(student, teacher, reverse=False)
    filled = project(student, teacher, reverse=False, embeddings=(ours, theirs), top_k=3)
    of_text = student.byte_table.lengths > 0
    changed = np.flatnonzero(plain.empty & ~filled.empty)
    assert spelling(student).index("鳥".encode()[:2]) in changed
    assert (~filled.empty[of_text]).all()
    assert filled.empty[student.pad_id]
    token = changed[0]
    cosines = theirs @ ours[token] / np.linalg.norm(theirs, axis=1) / np.linalg.norm(ours[token])
    cosines[teacher.byte_table.lengths == 0] = -1
    best = np.argsort(-cosines)[:3]
    weights = np.maximum(cosines[best], 0) ** 10
    assert row(filled, token) == pytest.approx(
        dict(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))
    )
    kept = np.flatnonzero(
        ~plain.empty & ~plain.exact & (plain.weights[:, 2] > 0) & (plain.weights[:, 3] == 0)
    )
    np.testing.assert_array_equal(filled.indices[kept], plain.indices[kept, :3])


def test_embeddings_mixed_into_splits(student: Tokenizer, teacher: Tokenizer) -> None:
    chance = np.random.default_rng(0)
    vectors = (
        chance.normal(size=(student.vocab_size, 4)),
        chance.normal(size=(teacher.vocab_size, 4)),
    )
    plain = project(student, teacher, top_k=2, reverse=False, max_pieces=2)
    mixed = project(
        student,
        teacher,
        top_k=8,
        reverse=False,
        max_pieces=2,
        embeddings=vectors,
        embedding_share=0.25,
    )
    tokens = np.flatnonzero(~plain.exact & ~plain.empty)
    assert len(tokens)
    for token in tokens:
        found = dict(zip(mixed.indices[token].tolist(), mixed.weights[token].tolist(), strict=True))
        for piece, weight in zip(
            plain.indices[token].tolist(), plain.weights[token].tolist(), strict=True
        ):
            assert piece < 0 or found[piece] >= 0.75 * weight - 1e-6
    np.testing.assert_array_equal(mixed.indices[mixed.exact, 0], plain.indices[plain.exact, 0])
    with pytest.raises(ConfigError, match=r"embeddings.*shapes.*\[300"):
        project(student, teacher, embeddings=(vectors[0][:10], vectors[1]))


def test_saved_and_loaded(
    student: Tokenizer, teacher: Tokenizer, sentencepiece: Tokenizer, tmp_path: Path
) -> None:
    found = project(student, teacher)
    found.save(tmp_path / "made" / "p.safetensors")
    loaded = Projection.load(tmp_path / "made" / "p.safetensors")
    for name in ("indices", "weights", "exact"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(found, name))
    assert loaded.settings == found.settings
    assert (loaded.student_size, loaded.teacher_size) == (student.vocab_size, teacher.vocab_size)
    loaded.check(student, teacher)
    with pytest.raises(ConfigError, match=r"teacher.*found .*spm"):
        loaded.check(student, sentencepiece)
    with pytest.raises(ConfigError, match="made for the student tokenizer"):
        loaded.check(teacher, teacher)


def test_files_that_are_no_projection(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "text").write_text(json.dumps({}))
    save_file({"indices": np.zeros((1, 1), np.int32)}, tmp_path / "other")
    with pytest.raises(FormatError, match="cannot be read as a projection"):
        Projection.load(tmp_path / "text")
    with pytest.raises(FormatError, match="cannot be read as a projection"):
        Projection.load(tmp_path / "missing")
    with pytest.raises(FormatError, match="not a projection"):
        Projection.load(tmp_path / "other")
    with pytest.raises(OutputError, match="cannot write the projection"):
        made_up([[1]], [[1.0]], [True]).save(tmp_path / "text" / "inside")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"max_pieces": 0}, "max_pieces must be at least 1, got 0"),
        ({"decay": 0.0}, "decay must be above 0 and at most 1"),
        ({"embedding_share": 1.0}, "embedding_share must be at least 0 and below 1"),
    ],
)
def test_settings_out_of_range(student: Tokenizer, changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        project(student, student, **changes)


CELLS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8), st.integers(1, 20)), max_size=40)


@settings(deadline=None)
@given(CELLS, st.integers(1, 5))
def test_cells_are_summed_and_the_heaviest_kept(
    listed: list[tuple[int, int, int]], top_k: int
) -> None:
    arrays = np.array(listed, np.int64).reshape(-1, 3)
    cells = Cells(rows=arrays[:, 0], columns=arrays[:, 1], weights=arrays[:, 2].astype(np.float64))
    indices, weights = heaviest(cells.summed(9), 6, top_k)
    for number in range(6):
        expected: dict[int, float] = {}
        for _, column, weight in (cell for cell in listed if cell[0] == number):
            expected[column] = expected.get(column, 0) + weight
        best = sorted(expected.items(), key=lambda cell: (-cell[1], cell[0]))[:top_k]
        total = sum(weight for _, weight in best)
        assert indices[number].tolist() == [column for column, _ in best] + [-1] * (
            top_k - len(best)
        )
        np.testing.assert_allclose(
            weights[number, : len(best)], [weight / total for _, weight in best], rtol=1e-6
        )


@pytest.mark.real_data
def test_real_vocabularies(real_data: Path) -> None:
    """A SentencePiece vocabulary of 32 k on a byte-level one of 151 k and back: nearly no row is
    empty.
    """
    phi = load_tokenizer(real_data / "tokenizers/hf/phi-3-mini/tokenizer.json.gz")
    qwen = load_tokenizer(real_data / "tokenizers/hf_derived/qwen2.5/tokenizer.json.gz")
    found = project(phi, qwen)
    ours, theirs = spelling(phi), spelling(qwen)
    assert found.empty[phi.byte_table.lengths > 0].mean() < 0.001
    assert found.exact.mean() > 0.8
    assert len(found.pairs()) > 26_000
    for ids in found.pairs().tolist():
        assert ours[ids[0]] == theirs[ids[1]] or ids == [phi.eos_id, qwen.eos_id]
    split = np.flatnonzero(~found.exact & ~found.empty)[::97]
    for token in split.tolist():
        pieces = [theirs[piece] for piece in found.indices[token] if piece >= 0]
        assert any(
            ours[token].startswith(piece) or piece.startswith(ours[token]) for piece in pieces
        )
