"""Chats: turns of the assistant are aligned with each other, their ends by an explicit pair, and
nothing else.
"""

import numpy as np
import pytest
from teacher_cases import CAPITALS, make_chats, student_tokenizer, teacher_tokenizer
from teacher_makers import word_pieces

from makers.datasets import prepare_here
from makers.texts import write_json_lines
from makers.tokenizers import CHAT_CONTROLS, CHATML
from penstock import Dataset, Loader, Source, open_dataset, write_dataset
from penstock.core.errors import ConfigError, ConversationError
from penstock.core.ragged import Ragged
from penstock.data.shards import (
    ShardLayout,
    ShardWriter,
    TokenizerInfo,
    finish_dataset,
    write_megatron,
)
from penstock.learn.distillation.companions import align_chats, match_documents
from penstock.learn.distillation.teacher_rows import TeacherRows, TeacherText
from penstock.tokenizers import Aligner
from penstock.tokenizers.alignment import CONTROL


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return student_tokenizer(tmp_path_factory.mktemp("student"), CHAT_CONTROLS)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return teacher_tokenizer(tmp_path_factory.mktemp("teacher"), ("<|begin|>", "<|done|>"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    records = make_chats(30)
    return write_json_lines(tmp_path_factory.mktemp("raw") / "chats.jsonl", records), records


def prepared(folder, source, tokenizer, template, **options):
    prepare_here(source, tokenizer, folder, template=template, **options)
    return Dataset.open(folder)


@pytest.fixture(scope="module")
def student_chats(tmp_path_factory, chats, student):
    return prepared(tmp_path_factory.mktemp("data") / "chats", chats[0], student, CHATML)


@pytest.fixture(scope="module")
def companion(tmp_path_factory, chats, teacher):
    return prepared(tmp_path_factory.mktemp("data") / "for teacher", chats[0], teacher, CAPITALS)


def build(student_chats, companion, **settings):
    defaults = {"sequence_length": 256, "rows_per_step": 2, "threads": 0}
    return Loader(
        Source(student_chats, max_epochs=1, name="chats"),
        companion=companion,
        **{**defaults, **settings},
    )


def trained(tokenizer, document):
    """Runs of trained tokens of a stored document, as text."""
    runs, last = [], False
    for token, weight in zip(document.tokens, document.loss_weights, strict=True):
        if weight and not last:
            runs.append([])
        if weight:
            runs[-1].append(token)
        last = bool(weight)
    return [tokenizer.decode(run) for run in runs]


def test_the_two_renderings_have_nothing_in_common_but_the_turns(
    student_chats, companion, student, teacher, chats
):
    answers = [message["content"] for message in chats[1][5]["messages"][1::2]]
    assert trained(student, student_chats[5]) == [answer + "<|im_end|>" for answer in answers]
    assert trained(teacher, companion[5]) == [answer + "<|done|>" for answer in answers]


def test_every_trained_token_has_its_chunk(student_chats, companion, student, teacher):
    aligner = Aligner(student, teacher)
    for mine, theirs in zip(student_chats, companion, strict=True):
        found = align_chats(
            aligner, mine.tokens, mine.loss_weights, theirs.tokens, theirs.loss_weights
        )
        for bounds, document in ((found.student_bounds, mine), (found.teacher_bounds, theirs)):
            covered = np.zeros(len(document.tokens), bool)
            for begin, end in bounds:
                assert not covered[begin:end].any()
                covered[begin:end] = True
            np.testing.assert_array_equal(covered, document.loss_weights > 0)
        assert (found.num_student_tokens, found.num_teacher_tokens) == (
            len(mine.tokens),
            len(theirs.tokens),
        )
        controls = found.kinds == CONTROL
        assert controls.sum() == len(trained(student, mine))
        assert (
            mine.tokens[found.student_bounds[controls, 0]] == student.special_tokens["<|im_end|>"]
        ).all()
        assert (
            theirs.tokens[found.teacher_bounds[controls, 0]] == teacher.special_tokens["<|done|>"]
        ).all()
        for (b, e), (first, last) in zip(
            found.student_bounds[~controls], found.teacher_bounds[~controls], strict=True
        ):
            spelled = student.byte_table.spell(mine.tokens[b:e]).tobytes()
            assert spelled == teacher.byte_table.spell(theirs.tokens[first:last]).tobytes()


def test_turns_that_differ_in_number(student, teacher):
    ids, other = student.encode("water the pipe"), teacher.encode("water the pipe")
    weights = np.ones(len(ids))
    with pytest.raises(ConversationError, match=r"1.*student's tokens, 0.*teacher's"):
        align_chats(Aligner(student, teacher), ids, weights, other, np.zeros(len(other)))
    none = align_chats(Aligner(student, teacher), ids, 0 * weights, other, np.zeros(len(other)))
    assert (len(none.kinds), none.student_bounds.shape, none.orphaned) == (0, (0, 2), 1.0)


def test_the_method_is_what_the_turns_took(tmp_path, student, teacher):
    ids = student.encode("the water")
    for other, expected in ((teacher, "bytes"), (word_pieces(tmp_path), "strings")):
        theirs = other.encode("the water")
        found = align_chats(
            Aligner(student, other), ids, np.ones(len(ids)), theirs, np.ones(len(theirs))
        )
        assert (found.method, found.coverage) == (expected, 1)


def test_ends_of_turns_on_one_side_and_turns_that_are_nothing_else(student, teacher):
    end, done = student.special_tokens["<|im_end|>"], teacher.special_tokens["<|done|>"]
    words, others = student.encode("water"), teacher.encode("water")
    aligner = Aligner(student, teacher)

    def align(ids, other_ids):
        return align_chats(aligner, ids, np.ones(len(ids)), other_ids, np.ones(len(other_ids)))

    one_side = align([*words, end], others)
    assert one_side.student_bounds[-1, 1] == len(words)
    both = align([end], [done])
    assert both.student_bounds.tolist() == both.teacher_bounds.tolist() == [[0, 1]]
    twice = align([*words, end, student.eos_id], [*others, done])
    assert twice.student_bounds[-1].tolist() == [len(words), len(words) + 1]
    assert twice.kinds[-1] == CONTROL
    other = align([*words, end], [*others, done, teacher.eos_id])
    assert other.teacher_bounds[-1].tolist() == [len(others), len(others) + 1]
    ended = align([*words, end, student.eos_id], [*others, done, teacher.eos_id])
    assert ended.student_bounds[-1].tolist() == [len(words) + 1, len(words) + 2]


def test_a_control_token_before_the_end_of_a_turn_is_not_its_end(student, teacher):
    """Such as </tool_call>, which the other template may spell as text."""
    closed, end = student.bos_id, student.special_tokens["<|im_end|>"]
    done = teacher.special_tokens["<|done|>"]
    words, others = student.encode("water"), teacher.encode("water")

    def controls(aligner, ids, other_ids):
        found = align_chats(aligner, ids, np.ones(len(ids)), other_ids, np.ones(len(other_ids)))
        kept = found.kinds == CONTROL
        sides = (ids, found.student_bounds), (other_ids, found.teacher_bounds)
        mine, theirs = ([side[at] for at in bounds[kept, 0]] for side, bounds in sides)
        return list(zip(mine, theirs, strict=True))

    plain = Aligner(student, teacher)
    assert controls(plain, [*words, closed, end], [*others, done]) == [(end, done)]
    both = controls(plain, [*words, closed, end], [*others, teacher.bos_id, done])
    assert both == [(closed, teacher.bos_id), (end, done)]
    # A pair that was told goes before that of the last tokens.
    told = Aligner(student, teacher, control_pairs={end: done})
    found = controls(told, [*words, end, student.eos_id], [*others, done])
    assert found == [(end, done)]


def test_companion_documents_of_a_joined_source(tmp_path, student_chats, chats, student, teacher):
    """Records are matched by file and line, so the teacher's parts may be others than the
    student's.
    """
    lines = chats[0].read_text().splitlines(keepends=True)
    for name, some in (("a", lines[:12]), ("b", lines[12:20]), ("c", lines[20:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(some))
    for folder, tokenizer, template, names in (
        ("student-0", student, CHATML, "ab"), ("student-1", student, CHATML, "c"),
        ("teacher-0", teacher, CAPITALS, "c"), ("teacher-1", teacher, CAPITALS, "ab"),
    ):  # fmt: skip
        prepared(
            tmp_path / folder,
            [str(tmp_path / f"{name}.jsonl") for name in names],
            tokenizer,
            template,
        )
    joined = open_dataset(tmp_path / "student-*")
    assert joined.chat == student_chats.chat
    texts = TeacherText(teacher, {"chats": str(tmp_path / "teacher-*")})
    whole, companion = (build(one, TeacherRows(student, [texts])) for one in (joined, joined))
    theirs = open_dataset(tmp_path / "teacher-*")
    seen = 0
    for row in (row for step in companion for row in step):
        (made,) = row.distillation
        for number, (_, document, _, _) in enumerate(made.pieces.tolist()):
            read = made.input.tokens[made.input.document_ids == number]
            # The teacher's documents of c come first: 10 of them, then those of a and b.
            np.testing.assert_array_equal(
                read, theirs[document + 10 if document < 20 else document - 20].tokens
            )
            seen += 1
    assert seen == 30
    assert whole.count_steps() > 1
    in_place = write_megatron(joined, tmp_path / "bare", drop_spans=True)
    with pytest.raises(ConfigError, match=r"source's.*dataset.*documents"):
        build(open_dataset([in_place]), TeacherRows(student, [texts]))


def test_rows_with_companion_documents(student_chats, companion, student, teacher):
    rows = TeacherRows(student, [TeacherText(teacher, {"chats": companion.path})])
    whole = [row for step in build(student_chats, rows) for row in step]
    turns = 0
    for row in whole:
        (made,) = row.distillation
        for number, (_, document, _, _) in enumerate(made.pieces.tolist()):
            read = made.input.tokens[made.input.document_ids == number]
            np.testing.assert_array_equal(read, companion[document].tokens)
        listed = np.zeros(row.sequence_length, bool)
        for begin, end in made.student_bounds:
            listed[begin - 1 : end - 1] = True
        np.testing.assert_array_equal(listed, row.loss_weights[0] > 0)
        ends = row.tokens[made.student_bounds[:, 0]] == student.special_tokens["<|im_end|>"]
        assert (
            made.input.tokens[made.teacher_bounds[ends, 0]] == teacher.special_tokens["<|done|>"]
        ).all()
        turns += int(ends.sum())
    assert turns == 60
    for mine, theirs in zip(
        (row for step in build(student_chats, rows, threads=3) for row in step), whole, strict=True
    ):
        np.testing.assert_array_equal(
            mine.distillation[0].teacher_bounds, theirs.distillation[0].teacher_bounds
        )


def test_a_chat_that_was_cut_in_parts(student_chats, companion, student, teacher):
    """The teacher reads the conversation up to the cut; each part has the chunks that lie in it."""
    rows = TeacherRows(student, [TeacherText(teacher, {"chats": companion.path})])
    parts = 0
    for row in (row for step in build(student_chats, rows, sequence_length=48) for row in step):
        (made,) = row.distillation
        for number, (_, document, first, tokens) in enumerate(made.pieces.tolist()):
            read = made.input.tokens[made.input.document_ids == number]
            if first or tokens < len(student_chats[document].tokens):
                parts += 1
            if len(read) > 1:
                np.testing.assert_array_equal(read, companion[document].tokens[: len(read)])
        for (b, e), (begin, end) in zip(made.student_bounds, made.teacher_bounds, strict=True):
            mine, theirs = row.tokens[b:e], made.input.tokens[begin:end]
            assert (
                student.byte_table.spell(mine).tobytes()
                == teacher.byte_table.spell(theirs).tobytes()
            )
    assert parts > 10


def test_a_chat_without_companion_documents_is_refused(student_chats, student, teacher):
    with pytest.raises(ConfigError, match=r"'chats'.*control.*'<\|im_start\|>'"):
        build(student_chats, TeacherRows(student, [TeacherText(teacher)]))
    pairs = {student.special_tokens["<|im_end|>"]: teacher.special_tokens["<|done|>"]}
    with pytest.raises(ConfigError, match=r"'<\|im_start\|>'.*pair.*token"):
        build(student_chats, TeacherRows(student, [TeacherText(teacher, control_pairs=pairs)]))
    pairs[student.special_tokens["<|im_start|>"]] = teacher.special_tokens["<|begin|>"]
    assert next(
        iter(
            build(student_chats, TeacherRows(student, [TeacherText(teacher, control_pairs=pairs)]))
        )
    )
    (row, *_) = next(iter(build(student_chats, TeacherRows(student, [TeacherText(student)]))))
    assert row.distillation[0].same_tokenizer


def test_companion_documents_of_the_wrong_tokenizer_or_source(
    student_chats, companion, student, teacher
):
    with pytest.raises(ConfigError, match=r"'chats'.*companion.*documents"):
        build(
            student_chats,
            TeacherRows(student, [TeacherText(teacher, {"chats": student_chats.path})]),
        )
    with pytest.raises(ConfigError, match=r"companion.*documents.*'chat'.*sources"):
        build(student_chats, TeacherRows(student, [TeacherText(teacher, {"chat": companion.path})]))


def test_a_record_that_is_missing_is_named_at_setup(
    tmp_path, chats, student_chats, student, teacher
):
    lines = chats[0].read_text().splitlines()
    (tmp_path / "chats.jsonl").write_text("\n".join([*lines[:7], *lines[8:]]) + "\n")
    other = prepared(tmp_path / "other", tmp_path / "chats.jsonl", teacher, CAPITALS)
    with pytest.raises(ConfigError, match=r"30.*30.*missing.*chats.jsonl:1 .*under"):
        build(student_chats, TeacherRows(student, [TeacherText(teacher, {"chats": other.path})]))
    assert (match_documents(student_chats, student_chats) == np.arange(30)).all()


def test_a_record_with_another_number_of_turns_is_named_at_its_step(
    tmp_path, chats, student_chats, student, teacher
):
    """Prepared with another choice of what is trained."""
    other = prepared(tmp_path / "other", chats[0], teacher, CAPITALS, mask_history=True)
    loader = build(
        student_chats, TeacherRows(student, [TeacherText(teacher, {"chats": other.path})])
    )
    with pytest.raises(
        ConversationError,
        match=r"document \d+\): [23] trained.* 1 in the",
    ):
        list(loader)


def test_records_are_matched_by_file_and_line_and_place_among_their_documents(tmp_path, student):
    """Whatever the order of the files, with lines left out on the teacher's side, and several
    documents of a record.
    """

    layout = ShardLayout(vocab_size=student.vocab_size)

    def write(name, files, places):
        folder = tmp_path / name
        folder.mkdir()
        with ShardWriter(folder, "part-0.arrow", layout) as writer:
            tokens = Ragged.from_rows([[1]] * len(places), np.int64)
            numbers, lines = (np.array(column) for column in zip(*places, strict=True))
            writer.write(tokens, files=numbers.astype(np.int32), lines=lines.astype(np.int64))
            shard = writer.finish()
        finish_dataset(
            folder,
            shards=[shard],
            layout=layout,
            tokenizer=TokenizerInfo.of(student),
            configuration="",
            files=files,
        )
        return Dataset.open(folder)

    mine = write("mine", ["a", "b"], [(0, 1), (0, 2), (0, 2), (1, 1), (1, 9), (-1, 0)])
    theirs = write("theirs", ["b", "a"], [(0, 1), (0, 2), (1, 1), (1, 2), (1, 2), (-1, 0), (1, 3)])
    assert match_documents(mine, theirs).tolist() == [2, 3, 4, 0, -1, 5]
    assert match_documents(theirs, mine).tolist() == [3, -1, 0, 1, 2, 5, -1]


def test_texts_may_have_companion_documents_too(tmp_path, student, teacher):
    texts = ["water the pipe", "steel and water flows"] * 4
    mine, theirs = (
        write_dataset(
            tmp_path / name, [side.encode(text) for text in texts], tokenizer=TokenizerInfo.of(side)
        )
        for name, side in (("mine", student), ("theirs", teacher))
    )
    plain = TeacherRows(student, [TeacherText(teacher, bos=False)])
    companions = TeacherRows(student, [TeacherText(teacher, {"chats": theirs.path})])
    for row, other in zip(
        next(iter(build(mine, plain))), next(iter(build(mine, companions))), strict=True
    ):
        np.testing.assert_array_equal(
            row.distillation[0].input.tokens, other.distillation[0].input.tokens
        )
        np.testing.assert_array_equal(
            row.distillation[0].teacher_bounds, other.distillation[0].teacher_bounds
        )
        assert len(row.distillation[0].weights)
