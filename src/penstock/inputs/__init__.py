"""Model inputs: the arrays of a row, and what a model asks of them."""

from penstock.inputs._kernels import blank, describe_row, join_rows, write_tokens
from penstock.inputs.attention import AttentionRule
from penstock.inputs.encoder_decoder import EncoderDecoderInput, encoder_decoder
from penstock.inputs.model_input import IGNORE, ModelInput
from penstock.inputs.packed_documents import pack_documents
from penstock.inputs.requirements import EVERYTHING, Attention, InputRequirements

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
