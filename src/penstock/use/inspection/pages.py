"""Pages of datasets and mixtures: documents with their origins, packed rows, lengths and shares."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.chat import ResolvedBoundary, detect_family, scan
from penstock.chat.trajectories.trajectory import Trajectory
from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.data.shards.format.manifest import ChatInfo
from penstock.data.shards.tables.corpus import Corpus
from penstock.plan.loader.loader import Loader
from penstock.tokenizers import Tokenizer
from penstock.use.inspection.datasets import (
    DatasetSummary,
    DocumentView,
    summarise,
    view_document,
)
from penstock.use.inspection.page_model import (
    Histogram,
    PageData,
    PageDocument,
    from_dataset,
    with_blanks,
)
from penstock.use.inspection.plan_report import dry_run
from penstock.use.inspection.rows import RowView
from penstock.use.inspection.terminal import QUANTILE_NAMES
from penstock.use.inspection.text import in_words
from penstock.use.inspection.unwritten import Unwritten

SHARE_STEPS = 100
"""Number of steps that the shares of a mixture are counted over."""


def page_of_dataset(
    dataset: Corpus, numbers: Sequence[int], rows: Sequence[RowView], tokenizer: Tokenizer | None
) -> PageData:
    """The page of one dataset; for chats with their settings, and with roles if the template's
    family is known.

    Args:
        dataset: An open dataset.
        numbers: Numbers of the documents to show.
        rows: Packed rows to show.
        tokenizer: Decodes the tokens; None: show ids.
    """
    controls = control_ids(tokenizer)
    found = summarise(dataset)
    chat = dataset.chat
    return PageData(
        title=found.name,
        settings={} if chat is None else settings_of_chats(chat),
        summary=summary_of(found, len(numbers)),
        documents=pages_of(dataset, numbers, tokenizer),
        rows=rows,
        histograms=_lengths(found),
        control_ids=controls,
    )


def pages_of(
    dataset: Corpus, numbers: Sequence[int], tokenizer: Tokenizer | None
) -> list[PageDocument]:
    """Some documents of a dataset; chats have turns if the template's family is known."""
    controls = control_ids(tokenizer)
    documents = [
        from_dataset(view_document(dataset, each, tokenizer, lines=True), controls)
        for each in numbers
    ]
    chat = dataset.chat
    boundaries = () if chat is None or tokenizer is None else _boundaries(chat, tokenizer)
    return [with_turns(document, boundaries) for document in documents] if boundaries else documents


def page_of_trajectories(
    views: Sequence[DocumentView], target: Unwritten, tokenizer: Tokenizer | None
) -> PageData:
    """The page of trajectories that are not written yet.

    Args:
        views: Their documents.
        target: The trajectories.
        tokenizer: Knows the control tokens; None: that of the trajectory, or show none.
    """
    known = target.tokenizer if isinstance(target, Trajectory) else None
    controls = control_ids(tokenizer or known)
    return PageData(
        title="trajectories",
        documents=[from_dataset(view, controls) for view in views],
        control_ids=controls,
    )


def page_of_mixture(
    title: str, loader: Loader, rows: Sequence[RowView], tokenizer: Tokenizer | None
) -> PageData:
    """The page of a mixture: rows, and requested and actual shares.

    Args:
        title: Title of the page.
        loader: The loader of the mixture; counting shares changes its place.
        rows: The rows to show.
        tokenizer: Knows the control tokens; None: show none.
    """
    report = dry_run(loader, SHARE_STEPS)
    settings = loader.settings
    return PageData(
        title=title,
        settings={
            **{name: in_words(getattr(settings, name)) for name in settings.__dataclass_fields__},
            "attention": loader.requirements.attention or "document",
        },
        summary={
            "sources": ", ".join(source.name for source in report.sources),
            "rows shown": len(rows),
            f"in the first {report.steps:,} steps": f"{report.rows:,} rows of {report.sequence_length:,} slots",  # noqa: E501
            "tokens": f"{report.tokens:,}",
            "padding": f"{report.padding:,} slots ({report.padding_share:.2%})",
            "epochs": ", ".join(f"{source.name} {source.epochs:.2f}" for source in report.sources),
        },
        rows=rows,
        shares={
            "requested share": {source.name: source.share for source in report.sources},
            f"actual share in {report.steps:,} steps": {
                source.name: source.share_given for source in report.sources
            },
            **{
                f"tasks of {source.name}, by document": source.tasks
                for source in report.sources
                if source.tasks
            },
        },
        control_ids=control_ids(tokenizer),
    )


def summary_of(found: DatasetSummary, shown: int) -> JsonObject:
    """The figures of a dataset as text."""
    spread = "" if shown == found.documents else f" of {found.documents:,}, spread over the dataset"
    trained = found.trained_tokens / max(1, found.tokens)
    lengths = (
        f"{QUANTILE_NAMES.get(q, f'{float(q):.0%}')} {value:,}"
        for q, value in found.length_quantiles.items()
    )
    return {
        "documents": f"{shown:,}{spread}",
        "tokens": f"{found.tokens:,}",
        "trained": f"{found.trained_tokens:,} ({trained:.1%})",
        "length": f"{', '.join(lengths)} tokens",
        "tokenizer": found.tokenizer or "unknown",
        "fingerprint": found.fingerprint,
        "path": found.path,
    }


def with_turns(document: PageDocument, boundaries: Sequence[ResolvedBoundary]) -> PageDocument:
    """A document of chats with roles and turns, found by role boundaries over its ids.

    Args:
        document: The document without roles.
        boundaries: The boundaries of the template's family.
    """
    whole = [replace(boundary, include_start=True) for boundary in boundaries]
    names = tuple(dict.fromkeys(boundary.role for boundary in boundaries))
    roles = np.full(len(document.ids), -1, np.int64)
    begins = np.zeros(len(document.ids), np.bool_)
    for number, name in enumerate(names):
        said = scan(document.ids, whole, {name}) != 0
        starts = said & (scan(document.ids, boundaries, {name}) == 0)
        roles[said] = number
        begins |= starts & ~np.append(False, starts[:-1])
    roles = with_blanks(document.pieces, roles)
    return replace(document, roles=roles, role_names=names, turns=np.cumsum(begins))


def control_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ids of the control tokens; empty without a tokenizer."""
    return frozenset() if tokenizer is None else frozenset(tokenizer.special_tokens.values())


def _lengths(found: DatasetSummary) -> dict[str, Histogram]:
    """Lengths over the whole dataset, in bins of doubling width."""
    if not found.histogram:
        return {}
    edges = [part.low for part in found.histogram] + [found.histogram[-1].high + 1]
    return {
        "tokens of a document, whole dataset": Histogram(
            edges, [part.documents for part in found.histogram]
        )
    }


def _boundaries(chat: ChatInfo, tokenizer: Tokenizer) -> tuple[ResolvedBoundary, ...]:
    """Role boundaries of the template's family; empty if it is unknown."""
    family = detect_family(chat.template)
    try:
        return () if family is None else family.resolve(tokenizer)
    except ConfigError:
        return ()


def settings_of_chats(chat: ChatInfo) -> JsonObject:
    """Settings that rendered and masked the conversations of a dataset."""
    rest = {name: value for group in chat.settings.values() for name, value in group.items()}
    stops = ", ".join(chat.stop_texts)
    found = {
        "template": chat.template_name,
        "date": chat.date,
        "trained turns end with": stops,
        **chat.variables,
        **rest,
    }
    return {name: in_words(value) for name, value in found.items() if value not in (None, {}, "")}
