"""The view of a document's chunks."""

import pytest
from teacher_cases import student_tokenizer, teacher_tokenizer

from makers.views import printed
from penstock import InputRequirements, Loader, Source, write_dataset
from penstock.core.errors import ConfigError
from penstock.data.shards import TokenizerInfo
from penstock.learn.distillation.teacher_rows import TeacherRows, TeacherText
from penstock.use.inspection.teacher_terminal import chunk_view


@pytest.fixture
def sides(tmp_path):
    return student_tokenizer(tmp_path / "student"), teacher_tokenizer(tmp_path / "teacher")


def first_row(tmp_path, sides, **settings):
    student, teacher = sides
    documents = [
        [*student.encode(text), student.eos_id] for text in ("water the pipe", "the pressure")
    ]
    data = write_dataset(tmp_path / "data", documents, tokenizer=TokenizerInfo.of(student))
    companion = TeacherRows(student, [TeacherText(teacher)])
    loader = Loader(
        Source(data, shuffle="none"),
        sequence_length=40,
        rows_per_step=1,
        companion=companion,
        **settings,
    )
    return next(iter(loader))[0]


def test_all_tokens_of_the_document_are_there_in_order(tmp_path, sides):
    student, teacher = sides
    row = first_row(tmp_path, sides)
    (made,) = row.distillation
    for document, text in enumerate(("water the pipe", "the pressure")):
        table = chunk_view(row, made, student, teacher, document=document)
        for column, tokenizer in zip(table.columns[:2], (student, teacher), strict=True):
            pieces = "".join(cell.plain for cell in column.cells).replace("│", "").replace("␣", " ")
            ends = dict.fromkeys(tokenizer.special_tokens, "")
            for name in ends:
                pieces = pieces.replace(name, "")
            assert pieces == text
        weights = list(table.columns[3].cells)
        assert weights.count("1") == (made.documents == document).sum()
        assert weights[0] == ""
    assert "the first 2 lines" in printed(chunk_view(row, made, student, teacher, limit=2))


def test_what_cannot_be_shown(tmp_path, sides):
    student, teacher = sides
    row = first_row(tmp_path, sides, requirements=InputRequirements(cu_seqlens=True))
    with pytest.raises(ConfigError, match="set document_ids=True"):
        chunk_view(row, row.distillation[0], student, teacher)
    with pytest.raises(ConfigError, match=r"document.*0.*\d.*row.*got.*9"):
        chunk_view(row, row.distillation[0], student, teacher, document=9)
