"""Turns sources into shards: in several processes, resumable at any moment, with every record accounted for."""

from penstock.core.lazy_imports import public_names
from penstock.prepare.preparation import prepare
from penstock.prepare.report import PrepareReport, SplitReport
from penstock.prepare.settings import ChatOptions, ChatSettings, PrepareSettings

__all__ = ["ChatOptions", "ChatSettings", "PrepareReport", "PrepareSettings", "SplitReport", "prepare"]

__dir__ = public_names(__name__)
