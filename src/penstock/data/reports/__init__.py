"""Reports of preparations: what went in, what came out, and that the two agree. A dataset holds
that of the preparation which made it.
"""

from typing import TYPE_CHECKING

from penstock.core.lazy_imports import lazy

if TYPE_CHECKING:
    from penstock.data.reports.report import PrepareReport, SplitReport
else:
    # Opening a dataset does not wait for what only its report needs.
    __getattr__, __dir__ = lazy(__name__, {"PrepareReport": "report", "SplitReport": "report"})

__all__ = ["PrepareReport", "SplitReport"]
