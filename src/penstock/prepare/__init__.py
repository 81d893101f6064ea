"""Sources to shards: encoded in several processes, resumable at any moment, accounted for to the last record."""

from penstock.prepare.chat_settings import ChatSettings
from penstock.prepare.preparing import prepare
from penstock.prepare.report import PrepareReport, SplitReport
from penstock.prepare.settings import PrepareSettings

__all__ = ["ChatSettings", "PrepareReport", "PrepareSettings", "SplitReport", "prepare"]
