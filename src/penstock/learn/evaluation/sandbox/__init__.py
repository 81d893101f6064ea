"""The sandbox: runs programs that a model wrote without giving them access to the machine."""

from penstock.core.lazy_imports import public_names
from penstock.learn.evaluation.sandbox.process import Limits, Outcome, Verdict
from penstock.learn.evaluation.sandbox.sandbox import Sandbox

__all__ = ["Limits", "Outcome", "Sandbox", "Verdict"]

__dir__ = public_names(__name__)
