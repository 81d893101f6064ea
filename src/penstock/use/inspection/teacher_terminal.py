"""Distillation in the terminal: the chunks of one document on both sides, and the findings of an
audit.
"""

from collections.abc import Iterator

import numpy as np
from rich.table import Table
from rich.text import Text

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError
from penstock.core.terminal import safe_console
from penstock.learn.distillation.teacher_rows import TeacherRow
from penstock.plan.inputs.model_input import ModelInput
from penstock.tokenizers import Tokenizer
from penstock.use.inspection.teacher_audit import AuditReport, Place

Line = tuple[slice, slice, float]
"""Slots of the student's row and of the teacher's, and the weight; 0 for tokens outside all
chunks.
"""
BAR = 24
"""Characters of a bar of 100 %."""


def chunk_view(
    row: ModelInput,
    made: TeacherRow,
    student: Tokenizer,
    teacher: Tokenizer,
    *,
    document: int = 0,
    limit: int = 60,
) -> Table:
    """A table of one document: each chunk's tokens on both sides, their numbers, and the chunk's
    weight.

    Tokens outside all chunks have lines of their own, without a weight.

    Args:
        row: The student's row, with `document_ids`.
        made: One teacher's side of it.
        student: The student's tokenizer; likewise `teacher`.
        document: Number of the document in the row.
        limit: Maximum number of lines.

    Raises:
        ConfigError: The row has no such document.
    """
    if not 0 <= document < len(made.pieces):
        raise ConfigError(
            f"document must be 0 … {len(made.pieces) - 1} in this row, got {document}"
        )
    table = Table(title=f"document {document} of the row")
    table.add_column("student")
    table.add_column("teacher")
    table.add_column("tokens", justify="right")
    table.add_column("weight", justify="right")
    for number, (mine, theirs, weight) in enumerate(_lines(row, made, document)):
        if number == limit:
            table.caption = f"the first {limit} lines"
            break
        counts = f"{mine.stop - mine.start}:{theirs.stop - theirs.start}"
        table.add_row(
            _spelled(student, row.tokens[mine]),
            _spelled(teacher, made.input.tokens[theirs]),
            counts,
            f"{weight:g}" if weight else "",
            style=None if weight else "dim",
        )
    return table


def _lines(row: ModelInput, made: TeacherRow, document: int) -> Iterator[Line]:
    """The document from its first token to its last: chunks, and the tokens between them."""
    begins, ends = zip(*(_range(side, document) for side in (row, made.input)), strict=True)
    here = made.documents == document
    bounds = np.stack([made.student_bounds[here], made.teacher_bounds[here]], axis=1)
    for (mine, theirs), weight in zip(bounds.tolist(), made.weights[here].tolist(), strict=True):
        if begins != (mine[0], theirs[0]):
            yield slice(begins[0], mine[0]), slice(begins[1], theirs[0]), 0.0
        yield slice(*mine), slice(*theirs), weight
        begins = mine[1], theirs[1]
    if begins != ends:
        yield slice(begins[0], ends[0]), slice(begins[1], ends[1]), 0.0


def _range(row: ModelInput, document: int) -> tuple[int, int]:
    """First slot of a document and the slot after its last."""
    begin, end = np.searchsorted(_document_ids(row), [document, document + 1]).tolist()
    return begin, end


def _document_ids(row: ModelInput) -> Array:
    if row.document_ids is None:
        raise ConfigError(
            "the row has no document_ids; set document_ids=True in the loader's requirements"
        )
    return row.document_ids


def _spelled(tokenizer: Tokenizer, ids: Array) -> Text:
    """The text of each token, separated by bars, with visible spaces and newlines."""
    shown = (
        tokenizer.decode([token]).replace(" ", "␣").replace("\n", "⏎") for token in ids.tolist()
    )
    return Text("│".join(shown))


def show_audit(report: AuditReport) -> None:
    """Print the findings."""
    console = safe_console()
    methods = ", ".join(f"{name} {count:,}" for name, count in report.methods.items())
    console.print(f"[bold]{report.student}[/bold] learns from [bold]{report.teacher}[/bold]")
    console.print(
        f"{report.documents:,} {'document' if report.documents == 1 else 'documents'}, "
        f"{report.student_tokens:,} tokens against {report.teacher_tokens:,}; aligned by: "
        f"{methods or 'nothing'}\n"
    )
    console.print(_shares(report))
    console.print(_vocabulary(report))
    if report.worst:
        console.print(_places(report.worst))
    console.print(f"[bold]{report.loss}[/bold]  {report.advice}")


def _shares(report: AuditReport) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(style="dim")
    rows = [
        ("in chunks", report.coverage, f"{report.chunks:,} chunks"),
        ("  one to one", report.one_to_one, "a token against a token"),
        ("  equal bytes", report.exact, ""),
        ("  equal, normalised", report.equivalent, "another form of it (Unicode, case)"),
        ("  control pairs", report.control, "BOS, EOS, ends of turns"),
        ("different", report.different, "never trained"),
        ("orphaned", report.orphaned, "no counterpart"),
    ]
    for name, share, note in rows:
        table.add_row(name, f"{100 * share:6.2f} %", "━" * round(BAR * share), note)
    if report.longest is not None:
        longest = report.longest
        table.add_row(
            "longest chunk",
            f"{longest.student_tokens} : {longest.teacher_tokens}",
            "",
            _quoted(longest)[0],
        )
    return table


def _vocabulary(report: AuditReport) -> str:
    vocabulary = report.vocabulary
    numerals = (
        f"of {vocabulary.numerals:,} numerals of several digits {vocabulary.shared_numerals:,}"
        if vocabulary.numerals
        else "it has no numerals of several digits"
    )
    return (
        f"\nOf the student's {vocabulary.student:,} tokens the teacher "
        f"({vocabulary.teacher:,}) has {vocabulary.shared:,} "
        f"({vocabulary.shared / max(vocabulary.student, 1):.0%}), {vocabulary.in_text:.1%} of "
        f"the text; {numerals}.\n"
    )


def _places(places: tuple[Place, ...]) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        title="Where they are not the same",
        title_justify="left",
        title_style="bold",
    )
    for name in ("document", "what", "tokens"):
        table.add_column(name, justify="right" if name != "what" else "left", no_wrap=True)
    table.add_column("student", overflow="fold")
    table.add_column("teacher", overflow="fold")
    for place in places:
        tokens = f"{place.student_tokens} : {place.teacher_tokens}"
        table.add_row(f"{place.document:,}", place.kind, tokens, *map(Text, _quoted(place)))
    return table


def _quoted(place: Place) -> tuple[str, str]:
    """The texts in quotes, so that their ends are visible."""
    student, teacher = (repr(text) for text in (place.student_text, place.teacher_text))
    return student if place.student_tokens else "–", teacher if place.teacher_tokens else "–"
