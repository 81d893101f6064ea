"""Recurrent layers over packed rows: states and windows stop at the borders of documents."""

from penstock.core.lazy_imports import public_names
from penstock.models.recurrent.borders import Borders, Chunks
from penstock.models.recurrent.convolution import causal_convolution, last_inputs
from penstock.models.recurrent.delta_rule import gated_delta_rule
from penstock.models.recurrent.operations import Operations
from penstock.models.recurrent.packages import PACKAGES
from penstock.models.recurrent.state_space import linear_scan, selective_scan, state_space_scan

__all__ = [
    "PACKAGES",
    "Borders",
    "Chunks",
    "Operations",
    "causal_convolution",
    "gated_delta_rule",
    "last_inputs",
    "linear_scan",
    "selective_scan",
    "state_space_scan",
]

__dir__ = public_names(__name__)
