"""Views for a terminal, in colour or with brackets instead of colours.

`terminal_rewritten` shows the documents that an objective rewrote.
"""

from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from penstock.plan.inputs import IGNORE
from penstock.plan.loader.ramp import Ramp
from penstock.use.inspection.datasets import DatasetSummary, DocumentView
from penstock.use.inspection.plan_report import PlanReport
from penstock.use.inspection.rows import RowDocument, RowView
from penstock.use.inspection.terminal_rewritten import parts_of_document
from penstock.use.inspection.terminal_style import (
    COLOURS,
    Style,
    colour_of,
    letter_of,
    row_strip,
    tree_view,
)
from penstock.use.inspection.terminal_trajectories import trajectory_view

QUANTILE_NAMES = {"0": "shortest", "0.5": "median", "1": "longest"}
BAR = 40
"""Characters of the longest bar."""


# -- datasets
# --------------------------------------------------------------------------------------------------


def dataset_view(summary: DatasetSummary) -> Group:
    """Counts and the histogram of a dataset."""
    facts = _facts()
    facts.add_row("dataset", f"{summary.name}  {summary.path}")
    facts.add_row(
        "documents",
        f"{summary.documents:,} in {summary.shards:,} {_plural('shard', summary.shards)}",
    )
    facts.add_row("tokens", f"{summary.tokens:,} ({summary.token_bytes} bytes each)")
    facts.add_row(
        "trained",
        f"{summary.trained_tokens:,} are "
        f"targets{' (some spans are not)' if summary.has_spans else ''}",
    )
    if summary.text_bytes is not None:
        rate = f", {summary.bytes_per_token:.2f} bytes per token" if summary.bytes_per_token else ""
        facts.add_row("text", f"{summary.text_bytes:,} bytes{rate}")
    if summary.tokenizer is not None:
        size = f", {summary.vocab_size:,} ids" if summary.vocab_size else ""
        facts.add_row("tokenizer", f"{summary.tokenizer}{size}")
    facts.add_row("checksums", "one for every 256 tokens" if summary.has_checksums else "none")
    facts.add_row("fingerprint", summary.fingerprint)
    lengths = "  ".join(
        f"{QUANTILE_NAMES.get(q, f'{float(q):.0%}')} {value:,}"
        for q, value in summary.length_quantiles.items()
    )
    facts.add_row("length", f"{lengths} tokens")
    return Group(facts, Text(), _histogram(summary))


def _histogram(summary: DatasetSummary) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("documents", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("of all tokens", justify="right", no_wrap=True)
    most = max((part.documents for part in summary.histogram), default=1)
    for part in summary.histogram:
        span = f"{part.low:,}" if part.low == part.high else f"{part.low:,}–{part.high:,}"
        share = part.tokens / max(1, summary.tokens)
        table.add_row(span, f"{part.documents:,}", _bar(part.documents / most, BAR), f"{share:.1%}")
    return table


def document_view(
    document: DocumentView, style: Style, max_tokens: int, *, log_probabilities: bool = False
) -> Group:
    """One document with its origin; a long one is shown from both ends; `log_probabilities`: of
    trajectories, a line for each sampled token.
    """
    head = Text(
        f"document {document.number}  {document.origin}  {len(document.tokens):,} tokens",
        style="bold",
    )
    weights = [0.0, *document.loss_weights[1:]] if document.loss_weights else []
    if document.trajectory is not None:
        texts = [text.replace("⏎", "⏎\n") for text in document.texts]
        shown = (document.trajectory, texts, weights, document.tokens, style, max_tokens)
        return Group(head, trajectory_view(*shown, log_probabilities=log_probabilities), Text())
    if not document.branches:
        return Group(head, _flow(document.texts, weights, COLOURS[0], style, max_tokens), Text())
    parts: list[Any] = []
    each = max(2, max_tokens // len(document.branches))
    for number, branch in enumerate(document.branches):
        inside = slice(branch.begin, branch.end)
        parts.append(Text(f"{letter_of(number)} {branch}", style=f"bold {colour_of(number)}"))
        parts.append(_flow(document.texts[inside], weights[inside], colour_of(number), style, each))
    return Group(head, tree_view(document.branches, style.width), *parts, Text())


# -- rows
# --------------------------------------------------------------------------------------------------


def row_view(row: RowView, style: Style, max_tokens: int) -> Group:
    """A row: a strip of its documents, then the text of each as it is trained."""
    padding = row.sequence_length - row.num_tokens
    head = Text.assemble(
        (f"step {row.step} row {row.row}", "bold"),
        f"  {row.sequence_length:,} slots, {len(row.documents)} "
        f"{_plural('document', len(row.documents))}, {padding:,} padding "
        f"({padding / row.sequence_length:.1%}), targets trained: "
        + _targets(row)
        + "".join(f", {task} {count:,}" for task, count in row.tasks.items()).replace(
            ",", "; tasks:", 1
        ),
    )
    weights = row.learned_weights
    parts: list[Any] = [head, row_strip(row, style.width)]
    for number, document in enumerate(row.documents):
        begin, end = document.begin, document.end
        parts.append(_document_head(row, document, number))
        if document.stretches:
            parts += parts_of_document(row, document, weights, style, max_tokens)
            continue
        parts.append(
            _flow(
                row.texts[begin:end],
                weights[begin:end].tolist(),
                colour_of(number),
                style,
                max_tokens,
            )
        )
    if padding:
        parts.append(
            Text(
                f"· padding  slots {row.num_tokens}–{row.sequence_length - 1}, never a target",
                style="dim",
            )
        )
    return Group(*parts, Text())


def _targets(row: RowView) -> str:
    """The number of targets at each distance; an objective that writes its own knows none."""
    if row.own_targets:
        return f"{row.num_targets():,}"
    return ", ".join(
        f"{row.num_targets(d):,} at distance {d}" for d in range(1, len(row.targets) + 1)
    )


def slots_view(row: RowView, begin: int, end: int) -> Table:
    """Slots [begin, end), one per line: token, position, and the targets at every distance (or
    those that the objective wrote) with their weights.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("slot", "doc", "pos", "id"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("token", no_wrap=True)
    for distance in range(1, len(row.targets) + 1):
        table.add_column("target" if row.own_targets else f"target +{distance}", no_wrap=True)
        table.add_column("weight", justify="right", no_wrap=True)
    roles = _roles(row)
    if roles:
        table.add_column("role", no_wrap=True)
    owners = {
        slot: i
        for i, document in enumerate(row.documents)
        for slot in range(document.begin, document.end)
    }
    for slot in range(begin, min(end, row.sequence_length)):
        owner = owners.get(slot)
        cells: list[str | Text] = []
        for targets, weights in zip(row.targets, row.loss_weights, strict=True):
            target = int(targets[slot])
            cells += ["–" if target == IGNORE else Text(row.spell(target)), f"{weights[slot]:g}"]
        cells += [roles.get(slot, "")] if roles else []
        letter = "·" if owner is None else letter_of(owner)
        token = Text("padding" if owner is None else row.texts[slot])
        style = "dim" if owner is None else colour_of(owner)
        table.add_row(
            str(slot),
            letter,
            str(row.positions[slot]),
            str(row.tokens[slot]),
            token,
            *cells,
            style=style,
        )
    return table


def _roles(row: RowView) -> dict[int, str]:
    """Purpose of each slot of rewritten documents."""
    return {
        slot: f"{each.role} {each.span}" if each.role in ("sentinel", "target") else each.role
        for document in row.documents
        for each in document.stretches
        for slot in range(each.begin, each.end)
    }


def _document_head(row: RowView, document: RowDocument, number: int) -> Text:
    begin, end = document.begin, document.end
    part = f" from its token {document.first_token}" if document.first_token else ""
    epoch = f", epoch {document.epoch}" if document.epoch else ""
    first, last = row.positions[begin], row.positions[end - 1]
    return Text.assemble(
        (f"{letter_of(number)} ", f"bold {colour_of(number)}"),
        (f"{document.source}", "bold"),
        _task(document),
        f"  {document.origin} (document {document.document}{part}{epoch})",
        f"  slots {begin}–{end - 1}, positions {first}–{last}",
    )


def _task(document: RowDocument) -> str:
    """The task of a document, and its number of spans or predicting slots."""
    if document.own_targets:
        return f"  {document.task}, predicts {document.num_predicted:,}"
    count = document.num_spans
    spans = f", {count:,} {_plural('span', count)}" if count else ""
    return f"  {document.task}{spans}" if document.task else ""


def _flow(texts: Any, weights: list[float], colour: str, style: Style, max_tokens: int) -> Padding:
    """Running text with one style per run of equal weight; the middle of a long text is left out
    and counted.
    """
    count = len(texts)
    half = max(1, max_tokens // 2)
    pieces = [(0, count)] if count <= max_tokens else [(0, half), (count - half, count)]
    flow = Text(overflow="fold")
    for number, (begin, end) in enumerate(pieces):
        if number:
            flow.append(f" …{count - 2 * half:,} tokens… ", "bold")
        start = begin
        for slot in range(begin + 1, end + 1):
            if slot == end or weights[slot] != weights[start]:
                flow.append_text(style.run("".join(texts[start:slot]), weights[start], colour))
                start = slot
    return Padding(flow, (0, 0, 0, 2), expand=False)


# -- plans
# --------------------------------------------------------------------------------------------------


def plan_view(report: PlanReport) -> Group:
    """The figures of a dry run."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("source", overflow="fold")
    untrained = any(source.untrained_parts for source in report.sources)
    titles = ("share", "given", "tokens", "documents", "epochs", "dropped", "cut off")
    for title in (*titles, "untrained after the cut") if untrained else titles:
        table.add_column(title, justify="right", no_wrap=True)
    for source in report.sources:
        asked = f"{source.share:.2%}"
        if source.share_at_end != source.share:
            asked += f" → {source.share_at_end:.2%}"
        table.add_row(
            source.name,
            asked,
            f"{source.share_given:.2%}",
            f"{source.tokens:,}",
            f"{source.documents:,} of {source.available_documents:,}",
            f"{source.epochs:.3f}",
            f"{source.dropped_documents + source.empty_documents:,}"
            + (f" ({source.dropped_tokens:,} tokens)" if source.dropped_tokens else ""),
            f"{source.truncated_tokens:,}",
            *(
                [f"{source.untrained_parts:,} ({source.untrained_tokens:,} tokens)"]
                if untrained
                else []
            ),
        )
    facts = _facts()
    ending = ", where the sources end" if report.ended else ""
    facts.add_row(
        "planned",
        f"{report.steps:,} {_plural('step', report.steps)} of {Ramp(report.rows_per_step)} "
        f"rows{ending}",
    )
    per_row = report.pieces / max(1, report.rows)
    facts.add_row(
        "rows",
        f"{report.rows:,} of {report.sequence_length:,} slots, {per_row:.1f} documents a "
        f"row{_bounds(report)}",
    )
    if without := report.rows_without_targets:
        facts.add_row(
            "no target", f"{without:,} {_plural('row', without)}, in which nothing is trained"
        )
    facts.add_row("tokens", f"{report.tokens:,}")
    for source in report.sources:
        if source.tasks:
            tasks = ", ".join(f"{name} {share:.1%}" for name, share in source.tasks.items())
            facts.add_row("tasks", f"{source.name}: {tasks} of documents")
    facts.add_row(
        "padding",
        f"{report.padding:,} slots ({report.padding_share:.2%}), packing {report.packing}",
    )
    if report.row_patches is not None:
        mean, most = report.row_patches
        facts.add_row("patches", f"{mean:,.0f} of images a row, at most {most:,}{_spread(report)}")
    facts.add_row(
        "planning", f"{report.planning_seconds:.2f} s, loading the compiled kernels included"
    )
    facts.add_row(
        "memory",
        f"{_size(report.row_bytes)} a row; this command at most {_size(report.peak_memory_bytes)}",
    )
    facts.add_row("state", f"{report.state_bytes:,} bytes after the last step")
    warnings = [Text(f"! {one}", style="yellow") for one in report.warnings]
    return Group(table, Text(), facts, *([Text()] if warnings else []), *warnings)


def _bounds(report: PlanReport) -> str:
    """The limits of a row's documents, in words."""
    bounds = ""
    if report.documents_per_row is not None:
        bounds += (
            f", at most {report.documents_per_row:,} ({report.rows_full_of_documents:,} rows have "
            "as many)"
        )
    if report.max_document_tokens is not None:
        bounds += f", each of at most {report.max_document_tokens:,} tokens"
    return bounds


def _spread(report: PlanReport) -> str:
    """How unequal the ranks' images are, in words."""
    if not report.patch_spread:
        return ""
    ratios = ", ".join(f"{ratio:.2f} of {ranks}" for ranks, ratio in report.patch_spread.items())
    return f"; the busiest rank of a step has, times the mean: {ratios} ranks"


def _facts() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _bar(share: float, width: int) -> str:
    """A bar in eighths of a character; at least one eighth for shares above 0."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _size(size: float) -> str:
    """1234567 → "1.23 MB"."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= limit:
            return f"{size / limit:.3g} {unit}"
    return f"{size:.0f} bytes"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
