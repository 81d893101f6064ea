"""Inspection: shows datasets, rows and mixtures in a terminal, or gives them as plain values. Does
not need torch.

Pages and raw conversations are in modules that are imported only when needed: `page`, `page_model`,
`pages`, `conversations` and `conversation_views`.
"""

from penstock.core.lazy_imports import lazy
from penstock.use.inspection.datasets import (
    DatasetSummary,
    DocumentView,
    summarise,
    view_document,
)
from penstock.use.inspection.plan_report import PlanReport, SourcePlan, dry_run
from penstock.use.inspection.rows import RowView, view_rows
from penstock.use.inspection.targets import CutDocuments
from penstock.use.inspection.terminal import (
    dataset_view,
    document_view,
    plan_view,
    row_view,
    slots_view,
)
from penstock.use.inspection.terminal_style import Style
from penstock.use.inspection.terminal_tokens import make_console
from penstock.use.inspection.text import token_texts, tokenizer_of

with lazy(__name__):
    from penstock.use.inspection.teacher_audit import AuditReport
    from penstock.use.inspection.teacher_audit_inputs import audit_teacher

__all__ = [
    "AuditReport",
    "CutDocuments",
    "DatasetSummary",
    "DocumentView",
    "PlanReport",
    "RowView",
    "SourcePlan",
    "Style",
    "audit_teacher",
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
]
