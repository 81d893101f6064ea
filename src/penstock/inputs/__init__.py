"""Model inputs: the arrays of a row, and what a model asks of them."""

from penstock.core.lazy_imports import public_names
from penstock.inputs._kernels import blank, describe_row, join_rows, write_tokens
from penstock.inputs.attention import AttentionRule
from penstock.inputs.encoder_decoder import EncoderDecoderInput, encoder_decoder
from penstock.inputs.model_input import EVERYTHING, IGNORE, Attention, InputRequirements, ModelInput, pack_documents

__all__ = [
    "EVERYTHING",
    "IGNORE",
    "Attention",
    "AttentionRule",
    "EncoderDecoderInput",
    "InputRequirements",
    "ModelInput",
    "blank",
    "describe_row",
    "encoder_decoder",
    "join_rows",
    "pack_documents",
    "write_tokens",
]

__dir__ = public_names(__name__)
