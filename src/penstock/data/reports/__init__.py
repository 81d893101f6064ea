"""Reports of preparations: what went in, what came out, and that the two agree. A dataset holds
that of the preparation which made it.
"""

from penstock.core.lazy_imports import lazy

# Opening a dataset does not wait for what only its report needs.
with lazy(__name__):
    from penstock.data.reports.report import PrepareReport, SplitReport

__all__ = ["PrepareReport", "SplitReport"]
