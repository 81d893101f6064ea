"""Model inputs: the arrays of a row, and what a model asks of them."""

from penstock.inputs._kernels import blank, describe_row, fill_with, join_rows, write_tokens
from penstock.inputs.model_input import IGNORE, ModelInput
from penstock.inputs.requirements import EVERYTHING, Attention, InputRequirements

__all__ = [
    "EVERYTHING",
    "IGNORE",
    "Attention",
    "InputRequirements",
    "ModelInput",
    "blank",
    "describe_row",
    "fill_with",
    "join_rows",
    "write_tokens",
]
