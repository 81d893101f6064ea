"""Teacher rows: the same documents in the teacher's tokens, and only chunks that both sides can be
held to.
"""

import multiprocessing
import pickle
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from teacher_cases import slow_chunks, student_tokenizer, teacher_tokenizer, water_texts

from contracts import assert_exact_resume, assert_ranks_share_steps, assert_same_row
from makers.datasets import prepare_here
from penstock import Dataset, Denoise, InputRequirements, Loader, Source, write_dataset
from penstock.core.errors import ConfigError
from penstock.data.shards import TokenizerInfo
from penstock.learn.distillation.teacher_rows import TeacherRow, TeacherRows, TeacherText
from penstock.plan.inputs import IGNORE, pack_documents
from penstock.plan.objectives import SpanCorruption


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return student_tokenizer(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return teacher_tokenizer(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, student):
    folder = tmp_path_factory.mktemp("data") / "text"
    prepare_here(iter(water_texts(150)), student, folder, add_bos="no")
    return Dataset.open(folder)


def build(corpus, companion, **settings):
    defaults = {
        "sequence_length": 96,
        "rows_per_step": 4,
        "seed": 3,
        "window_rows": 32,
        "threads": 0,
    }
    return Loader(
        Source(corpus, max_epochs=1, name="text"), companion=companion, **{**defaults, **settings}
    )


def rows_of(loader, count=None):
    return [row for step in islice(loader, count) for row in step]


def assert_same_teacher_row(left: TeacherRow, right: TeacherRow) -> None:
    assert_same_row(left.input, right.input)
    for name in (
        "student_bounds",
        "teacher_bounds",
        "weights",
        "documents",
        "text_bytes",
        "pieces",
    ):
        mine, theirs = getattr(left, name), getattr(right, name)
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
    assert left.same_tokenizer == right.same_tokenizer


def assert_same_results(left, right):
    assert len(left) == len(right)
    for mine, theirs in zip(left, right, strict=True):
        for one, other in zip(mine.distillation, theirs.distillation, strict=True):
            assert_same_teacher_row(one, other)


def assert_sound(row, made):
    """What holds for every teacher row, whatever it was made from."""
    packed = made.input
    assert (
        made.student_bounds.dtype == made.teacher_bounds.dtype == made.documents.dtype == np.int32
    )
    assert made.weights.dtype == np.float32
    assert (made.weights > 0).all()
    for bounds, side in ((made.student_bounds, row), (made.teacher_bounds, packed)):
        assert (bounds[:, 0] < bounds[:, 1]).all()
        assert (bounds[1:, 0] >= bounds[:-1, 1]).all()
        # The predictors, and all tokens, lie in the chunk's document.
        for place in (bounds[:, 0] - 1, bounds[:, 1] - 1):
            np.testing.assert_array_equal(side.document_ids[place], made.documents)
    # Every document of the row is there, in order, apart, and padding is at the end only.
    assert packed.num_documents == row.num_documents == len(made.text_bytes) == len(made.pieces)
    lengths = np.diff(packed.cu_seqlens)
    assert (lengths > 0).all()
    assert packed.cu_seqlens[-1] == packed.sequence_length
    np.testing.assert_array_equal(packed.positions, np.concatenate([np.arange(n) for n in lengths]))
    np.testing.assert_array_equal(packed.document_ids, np.repeat(np.arange(len(lengths)), lengths))
    reference = np.append(packed.tokens[1:], IGNORE)
    reference[packed.cu_seqlens[1:] - 1] = reference[packed.num_tokens :] = IGNORE
    if not made.same_tokenizer:
        np.testing.assert_array_equal(packed.targets, reference[None])


def test_chunks_are_those_of_the_obvious_way(corpus, student, teacher):
    rows = rows_of(build(corpus, TeacherRows(student, [TeacherText(teacher)])))
    assert len(rows) > 20
    many_to_many = 0
    for row in rows:
        (made,) = row.distillation
        assert_sound(row, made)
        reference = slow_chunks(row, made.input, student, teacher)
        found = np.concatenate([made.student_bounds, made.teacher_bounds], axis=1)
        texts = [made.input.tokens[made.input.document_ids == d] for d in range(row.num_documents)]
        assert made.text_bytes.tolist() == [len(teacher.byte_table.spell(ids)) for ids in texts]
        # EOS is a pair of control tokens, which bytes know nothing of.
        eos = row.tokens[found[:, 0]] == student.eos_id
        assert (made.input.tokens[found[eos, 2]] == teacher.eos_id).all()
        assert found[~eos].tolist() == [list(chunk[:4]) for chunk in reference]
        np.testing.assert_allclose(made.weights[~eos], [chunk[4] for chunk in reference])
        assert made.documents[~eos].tolist() == [chunk[5] for chunk in reference]
        many_to_many += int((np.diff(found[:, :2]) + np.diff(found[:, 2:]) > 3).sum())
        assert not made.same_tokenizer
    assert many_to_many > 0


def test_the_teacher_reads_its_own_encoding(corpus, student, teacher):
    (row, *_) = rows_of(build(corpus, TeacherRows(student, [TeacherText(teacher)])), 1)
    (made,) = row.distillation
    for number, (_, document, first, tokens) in enumerate(made.pieces.tolist()):
        text = student.decode(corpus[document].tokens[first : first + tokens][:-1])
        found = made.input.tokens[made.input.document_ids == number]
        assert found.tolist() == [teacher.bos_id, *teacher.encode(text).tolist(), teacher.eos_id]


def test_every_end_of_a_whole_document_is_trained(corpus, student, teacher):
    for row in rows_of(build(corpus, TeacherRows(student, [TeacherText(teacher)]))):
        (made,) = row.distillation
        last = np.flatnonzero(row.tokens == student.eos_id)
        assert np.isin(last, made.student_bounds[:, 0]).all()


def test_parts_that_begin_and_end_inside_a_character(tmp_path, student, teacher):
    text = "水🙂größe" * 30
    ids = student.encode(text)
    corpus = write_dataset(tmp_path / "cut", [ids], tokenizer=TokenizerInfo.of(student))
    for length in (7, 8, 9, 11):
        loader = build(
            corpus,
            TeacherRows(student, [TeacherText(teacher)]),
            sequence_length=length,
            packing="concat",
        )
        for row in rows_of(loader):
            (made,) = row.distillation
            assert_sound(row, made)
            for (b, e), (first, last) in zip(made.student_bounds, made.teacher_bounds, strict=True):
                mine = student.byte_table.spell(row.tokens[b:e]).tobytes()
                assert mine == teacher.byte_table.spell(made.input.tokens[first:last]).tobytes()
                mine.decode()


@pytest.mark.parametrize("settings", [{}, {"threads": 1}, {"threads": 3, "prefetch": 4}])
def test_the_same_for_any_threads_and_after_a_seek(corpus, student, teacher, settings):
    companion = TeacherRows(student, [TeacherText(teacher), TeacherText(student)])
    whole = rows_of(build(corpus, companion))
    assert_same_results(rows_of(build(corpus, companion, **settings)), whole)
    assert_same_results(rows_of(build(corpus, companion, **settings).seek(3), 2), whole[12:20])


def test_resume_and_ranks(corpus, student, teacher):
    companion = TeacherRows(student, [TeacherText(teacher)])
    assert_exact_resume(lambda: build(corpus, companion, threads=2), 4)
    assert_ranks_share_steps(lambda rank: build(corpus, companion, data_parallel=rank), [1, 2], 4)
    whole = rows_of(build(corpus, companion), 4)
    ranks = [
        [list(step) for step in islice(build(corpus, companion, data_parallel=(rank, 2)), 4)]
        for rank in (0, 1)
    ]
    assert_same_results(
        [row for parts in zip(*ranks, strict=True) for part in parts for row in part], whole
    )


def rows_in_process(corpus, companion):
    return [row.distillation for row in rows_of(build(corpus, companion, threads=1), 2)]


def test_a_spawned_process_makes_the_same(corpus, student, teacher):
    companion = TeacherRows(student, [TeacherText(teacher)])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        made = pool.apply(rows_in_process, (corpus, companion))
    for mine, row in zip(made, rows_of(build(corpus, companion), 2), strict=True):
        assert_same_teacher_row(mine[0], row.distillation[0])
    # What travels is the vocabularies, and no tables.
    sources = sum(
        len(content) for side in (student, teacher) for content in side.source_bytes.values()
    )
    assert len(pickle.dumps(companion)) < sources + 20_000


def test_the_same_tokenizer_reads_the_row_itself(corpus, student):
    for row in rows_of(build(corpus, TeacherRows(student, [TeacherText(student)]))):
        (made,) = row.distillation
        assert_sound(row, made)
        assert made.same_tokenizer
        assert np.shares_memory(made.input.tokens, row.tokens)
        np.testing.assert_array_equal(made.student_bounds, made.teacher_bounds)
        predictors = np.flatnonzero(
            (row.targets[0] != IGNORE)[:-1] & (np.diff(row.document_ids) == 0)
        )
        np.testing.assert_array_equal(
            made.student_bounds, np.stack([predictors + 1, predictors + 2], 1)
        )
        np.testing.assert_array_equal(made.weights, row.loss_weights[0][predictors])


def test_the_teachers_context_cuts_tails_and_never_fails(corpus, student, teacher):
    for tokenizer in (student, teacher):
        whole = rows_of(build(corpus, TeacherRows(student, [TeacherText(tokenizer)])))
        cut = rows_of(build(corpus, TeacherRows(student, [TeacherText(tokenizer, max_tokens=10)])))
        lost = 0
        for row, full in zip(cut, whole, strict=True):
            (made,), (expected,) = row.distillation, full.distillation
            assert_sound(row, made)
            starts = expected.input.cu_seqlens[expected.documents]
            kept = expected.teacher_bounds[:, 1] - starts <= 10
            np.testing.assert_array_equal(made.student_bounds, expected.student_bounds[kept])
            assert np.diff(made.input.cu_seqlens)[: made.input.num_documents].max(initial=0) <= 10
            lost += int((~kept).sum())
        assert lost > 0


def test_padding_is_in_no_chunk_even_where_it_is_eos(corpus, student, teacher):
    """And the real EOS at the end of a document stays in."""
    companion = TeacherRows(student, [TeacherText(teacher, multiple=32), TeacherText(student)])
    padded = rows_of(build(corpus, companion, pad_id=student.eos_id))
    real_ends = 0
    for row, other in zip(padded, rows_of(build(corpus, companion)), strict=True):
        for made, expected in zip(row.distillation, other.distillation, strict=True):
            np.testing.assert_array_equal(made.student_bounds, expected.student_bounds)
            assert made.student_bounds.max(initial=0) <= row.num_tokens
            assert made.teacher_bounds.max(initial=0) <= made.input.num_tokens
            ends = np.flatnonzero(row.tokens[: row.num_tokens] == student.eos_id)
            assert np.isin(ends, made.student_bounds[:, 0]).all()
            real_ends += len(ends)
    assert real_ends > 100


def test_a_first_token_has_no_predictor_whatever_the_slot_before_it_counts(
    tmp_path, student, teacher
):
    """As when a split part lies before a document: its last slot has a target, in no row with
    it.
    """
    documents = [[student.bos_id, *student.encode("water the pipe")]] * 4
    corpus = write_dataset(tmp_path / "few", documents, tokenizer=TokenizerInfo.of(student))
    rows = TeacherRows(
        student, [TeacherText(teacher, bos=False), TeacherText(teacher), TeacherText(student)]
    )

    class Counting:
        def begin(self, sources):
            ready = rows.begin(sources)
            return lambda row, pieces: ready(
                replace(row, loss_weights=np.ones_like(row.loss_weights)), pieces
            )

    for row in rows_of(build(corpus, Counting())):
        for made in row.distillation:
            assert_sound(row, made)


def test_row_length_is_a_multiple_and_no_more(corpus, student, teacher):
    for multiple in (1, 64):
        for row in rows_of(
            build(corpus, TeacherRows(student, [TeacherText(teacher, multiple=multiple)])), 3
        ):
            (made,) = row.distillation
            assert_sound(row, made)
            assert made.input.sequence_length % multiple == 0
            assert made.input.sequence_length - made.input.num_tokens < multiple


def test_bos_on_one_side_leaves_the_content_as_it_was(corpus, student, teacher):
    plain = rows_of(build(corpus, TeacherRows(student, [TeacherText(teacher, bos=False)])))
    with_bos = rows_of(build(corpus, TeacherRows(student, [TeacherText(teacher)])))
    for row, other in zip(with_bos, plain, strict=True):
        (made,), (without,) = row.distillation, other.distillation
        assert_sound(row, made)
        assert (
            made.input.tokens[made.input.positions == 0][: row.num_documents] == teacher.bos_id
        ).all()
        # The first chunk has no predictor on the student's side, with BOS before the teacher's or
        # not.
        np.testing.assert_array_equal(made.student_bounds, without.student_bounds)
        np.testing.assert_array_equal(
            made.teacher_bounds, without.teacher_bounds + made.documents[:, None] + 1
        )


def test_bos_on_both_sides_trains_the_first_word(tmp_path, student, teacher):
    texts = water_texts(20, longest=12)
    documents = [np.append([student.bos_id], student.encode(text)) for text in texts]
    corpus = write_dataset(tmp_path / "bos", documents, tokenizer=TokenizerInfo.of(student))
    for bos in (None, True, False):
        for row in rows_of(
            build(corpus, TeacherRows(student, [TeacherText(teacher, bos=bos)]), packing="none")
        ):
            (made,) = row.distillation
            assert_sound(row, made)
            assert (made.input.tokens[0] == teacher.bos_id) == (bos is not False)
            if len(made.student_bounds):
                assert (made.student_bounds[0, 0] == 1) == (bos is not False)


def test_a_text_begins_as_the_teacher_was_trained(tmp_path, student, teacher):
    """By its run's word; else by its tokenizer's, or as the student's document does."""
    silent = teacher.beginning_with(())
    assert teacher.begin_ids
    words = student.encode("water the pipe")
    begins = {}
    for name, ids in (("with", [student.bos_id, *words]), ("without", words)):
        corpus = write_dataset(tmp_path / name, [ids], tokenizer=TokenizerInfo.of(student))
        for reader in (teacher, silent):
            for trained in (None, True, False):
                text = TeacherText(reader, trained_with_bos=trained)
                rows = rows_of(build(corpus, TeacherRows(student, [text]), packing="none"))
                first = rows[0].distillation[0].input.tokens[0]
                begins[name, reader is teacher, trained] = bool(first == teacher.bos_id)
    assert begins == {
        (name, adds, trained): (adds or name == "with") if trained is None else trained
        for name, adds, trained in begins
    }


def test_weights_are_means_and_an_untrained_token_takes_its_chunk_out(tmp_path, student, teacher):
    texts = water_texts(40, seed=9)
    documents = [student.encode(text) for text in texts]
    generator = np.random.default_rng(0)
    spans = []
    for ids in documents:
        edges = np.unique(generator.integers(0, len(ids) + 1, 6)).tolist()
        weights = generator.choice([0.0, 0.5, 2.0], len(edges) - 1).tolist()
        spans.append([span for span in zip(edges[:-1], edges[1:], weights, strict=True) if span[2]])
    corpus = write_dataset(
        tmp_path / "weighted", documents, spans=spans, tokenizer=TokenizerInfo.of(student)
    )
    listed = 0
    for row in rows_of(build(corpus, TeacherRows(student, [TeacherText(teacher)]))):
        (made,) = row.distillation
        assert_sound(row, made)
        reference = slow_chunks(row, made.input, student, teacher)
        assert made.student_bounds.tolist() == [list(chunk[:2]) for chunk in reference]
        np.testing.assert_allclose(made.weights, [chunk[4] for chunk in reference], rtol=1e-6)
        listed += len(reference)
    assert listed > 50


def test_rows_without_loss_weights_take_them_from_the_targets(corpus, student, teacher):
    companion = TeacherRows(student, [TeacherText(teacher), TeacherText(student)])
    lean = InputRequirements(asked_by="a lean model", cu_seqlens=True)
    for mine, theirs in zip(
        rows_of(build(corpus, companion, requirements=lean)),
        rows_of(build(corpus, companion)),
        strict=True,
    ):
        assert mine.loss_weights is None
        for one, other in zip(mine.distillation, theirs.distillation, strict=True):
            np.testing.assert_array_equal(one.student_bounds, other.student_bounds)
            np.testing.assert_array_equal(one.weights, other.weights)
            np.testing.assert_array_equal(one.documents, other.documents)


def test_rows_without_a_chunk(tmp_path, student, teacher):
    """Documents of one token, documents of control tokens alone, bytes that are no text, and rows
    that are empty.
    """
    documents = [
        [5],
        [student.eos_id, student.eos_id],
        student.encode("水")[:1],
        student.encode("a"),
    ] * 3
    corpus = write_dataset(tmp_path / "short", documents, tokenizer=TokenizerInfo.of(student))
    companion = TeacherRows(student, [TeacherText(teacher, multiple=8), TeacherText(student)])
    rows = rows_of(
        build(corpus, companion, sequence_length=4, rows_per_step=8, data_parallel=(7, 8))
    )
    rows += rows_of(build(corpus, companion, sequence_length=4, packing="none"))
    assert any(row.num_documents == 0 for row in rows)
    for row in rows:
        for made in row.distillation:
            assert_sound(row, made)
            assert made.input.sequence_length >= 1
            if row.num_tokens < 2:
                assert len(made.weights) == 0


def test_joined_documents_stay_apart_for_a_teacher_with_another_tokenizer(corpus, student, teacher):
    companion = TeacherRows(student, [TeacherText(teacher)])
    joined = rows_of(build(corpus, companion, attention="row"))
    assert_same_results(joined, rows_of(build(corpus, companion)))


def test_objectives_that_rewrite_are_for_teachers_with_the_same_tokenizer(corpus, student, teacher):
    denoise = Denoise([SpanCorruption(0.15, 3)], sentinels=list(range(280, 300)))
    source = Source(corpus, name="noisy", objective=denoise, max_epochs=1)
    with pytest.raises(ConfigError, match=r"'noisy'.*'denoise'.*documents.*causal"):
        Loader(
            source,
            sequence_length=96,
            rows_per_step=4,
            companion=TeacherRows(student, [TeacherText(teacher)]),
        )
    loader = Loader(
        source,
        sequence_length=96,
        rows_per_step=4,
        companion=TeacherRows(student, [TeacherText(student)]),
    )
    for row in rows_of(loader, 3):
        (made,) = row.distillation
        assert (
            made.input.prefix_lengths is row.prefix_lengths
            or (made.input.prefix_lengths == row.prefix_lengths).all()
        )
        predictors = made.student_bounds[:, 0] - 1
        np.testing.assert_array_equal(
            row.targets[0][predictors], row.tokens[made.student_bounds[:, 0]]
        )
        assert len(predictors) == (row.targets[0] != IGNORE).sum()
    cut = Loader(
        source,
        sequence_length=96,
        rows_per_step=4,
        companion=TeacherRows(student, [TeacherText(student, max_tokens=9)]),
    )
    with pytest.raises(ConfigError, match=r"reads.*9.*tokens.*document"):
        next(iter(cut))


def test_sources_of_another_tokenizer_than_the_students(corpus, student, teacher):
    with pytest.raises(ConfigError, match=r"'text'.*tokenizer.*use.*tokenizer"):
        build(corpus, TeacherRows(teacher, [TeacherText(student)]))


def test_settings_out_of_range(student, teacher, tmp_path):
    with pytest.raises(ConfigError, match="max_tokens must be at least 1, got 0"):
        TeacherText(teacher, max_tokens=0)
    with pytest.raises(ConfigError, match="multiple must be at least 1, got 0"):
        TeacherText(teacher, multiple=0)


def test_a_row_of_no_documents():
    row, starts = pack_documents([], np.zeros(0, np.int32), multiple=4)
    assert (row.sequence_length, row.num_tokens, row.max_seqlen, len(starts)) == (4, 0, 4, 0)
    assert row.cu_seqlens.tolist() == [0, 4]
    assert (row.targets == IGNORE).all()
