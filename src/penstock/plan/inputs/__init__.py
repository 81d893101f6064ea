"""Model inputs: the arrays of a row, and what a model asks of them."""

from penstock.core.lazy_imports import public_names
from penstock.plan.inputs.attention import AttentionRule
from penstock.plan.inputs.encoder_decoder import EncoderDecoderInput, encoder_decoder
from penstock.plan.inputs.model_input import IGNORE, pack_documents
from penstock.plan.inputs.requirements import EVERYTHING, Attention
from penstock.plan.inputs.row_slices import RowSlice

__all__ = [
    "EVERYTHING",
    "IGNORE",
    "Attention",
    "AttentionRule",
    "EncoderDecoderInput",
    "RowSlice",
    "encoder_decoder",
    "pack_documents",
]

__dir__ = public_names(__name__)
