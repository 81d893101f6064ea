"""Keyword arguments of functions that decide what is trained."""

# Written by `make keywords` from the classes that declare these settings.

from typing import Literal, TypedDict

from penstock.chat.masks.mask_settings import ControlTextPolicy, Terminators


class MaskKeywords(TypedDict, total=False):
    """Settings of the mask; see `MaskSettings`."""

    roles_to_train: list[str] | tuple[str, ...]
    train_on_inputs: bool
    train_on_eos: Terminators
    train_on_eot: Terminators | None
    mask_history: bool
    train_on_reasoning: bool
    trained_control_text: ControlTextPolicy
    allow_forged: bool
    on_missing_terminator: Literal["error", "allow", "append"]
    on_rewrite: Literal["report", "error", "split"]
    on_merged_prompt: Literal["report", "error", "split"]
