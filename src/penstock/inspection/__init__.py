"""Inspection: datasets, rows and mixtures made visible, in a terminal or as plain values. No torch.

Pages and raw conversations have doors of their own, loaded only when they are used: `html`, `pages`, `samples`,
`conversations` and `conversation_views`.
"""

from penstock.inspection.datasets import DatasetSummary, DocumentView, summarise, view_document
from penstock.inspection.dry_run import PlanReport, SourcePlan, dry_run
from penstock.inspection.rows import RowView, view_rows
from penstock.inspection.style import Style, make_console
from penstock.inspection.terminal import dataset_view, document_view, plan_view, row_view, slots_view
from penstock.inspection.text import token_texts, tokenizer_of
from penstock.terminal import visible

__all__ = [
    "DatasetSummary",
    "DocumentView",
    "PlanReport",
    "RowView",
    "SourcePlan",
    "Style",
    "dataset_view",
    "document_view",
    "dry_run",
    "make_console",
    "plan_view",
    "row_view",
    "slots_view",
    "summarise",
    "token_texts",
    "tokenizer_of",
    "view_document",
    "view_rows",
    "visible",
]
