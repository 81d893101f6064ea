"""An audit's findings in the terminal."""

from typing import Any

from penstock.distillation.audit import AuditReport, Place
from penstock.terminal import safe_console

BAR = 24
"""Characters of a bar of 100 %."""


def show_audit(report: AuditReport) -> None:
    """Print the findings."""
    console = safe_console()
    methods = ", ".join(f"{name} {count:,}" for name, count in report.methods.items())
    console.print(f"[bold]{report.student}[/bold] learns from [bold]{report.teacher}[/bold]")
    console.print(
        f"{report.documents:,} {'document' if report.documents == 1 else 'documents'}, {report.student_tokens:,} "
        f"tokens against {report.teacher_tokens:,}; aligned by: {methods or 'nothing'}\n"
    )
    console.print(_shares(report))
    console.print(_vocabulary(report))
    if report.worst:
        console.print(_places(report.worst))
    console.print(f"[bold]{report.loss}[/bold]  {report.advice}")


def _shares(report: AuditReport) -> Any:
    from rich.table import Table

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
        table.add_row("longest chunk", f"{longest.student_tokens} : {longest.teacher_tokens}", "", _quoted(longest)[0])
    return table


def _vocabulary(report: AuditReport) -> Any:
    vocabulary = report.vocabulary
    numerals = (
        f"of {vocabulary.numerals:,} numerals of several digits {vocabulary.shared_numerals:,}"
        if vocabulary.numerals
        else "it has no numerals of several digits"
    )
    return (
        f"\nOf the student's {vocabulary.student:,} tokens the teacher ({vocabulary.teacher:,}) has "
        f"{vocabulary.shared:,} ({vocabulary.shared / max(vocabulary.student, 1):.0%}), "
        f"{vocabulary.in_text:.1%} of the text; {numerals}.\n"
    )


def _places(places: tuple[Place, ...]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, pad_edge=False, title="Where they are not the same", title_justify="left", title_style="bold"
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
    """The texts with their ends to be seen."""
    student, teacher = (repr(text) for text in (place.student_text, place.teacher_text))
    return student if place.student_tokens else "–", teacher if place.teacher_tokens else "–"
