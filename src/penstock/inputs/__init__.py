"""Model inputs: the arrays of a row, and what a model asks of them."""

from penstock.core.lazy_imports import public_names
from penstock.inputs.attention import AttentionRule
from penstock.inputs.encoder_decoder import EncoderDecoderInput, encoder_decoder
from penstock.inputs.model_input import EVERYTHING, IGNORE, Attention, pack_documents
from penstock.inputs.row_slices import RowSlice

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
