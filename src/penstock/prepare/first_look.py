"""A look at the input before it is prepared: whether the fast encoder is right on it, and what people are told.

What is told goes to standard error, a line at a time, and only where progress is shown.
"""

import sys
from collections.abc import Iterator, Sequence

from penstock.errors import RecordError
from penstock.prepare.chat_info import chat_notices
from penstock.prepare.part import Workshop
from penstock.prepare.recipe import Block, ChatRecipe
from penstock.sources import ObjectBlock, Part, RecordBlock
from penstock.terminal import visible

SAMPLE_PARTS, SAMPLE_BYTES, SAMPLE_TEXT = 4, 50_000, 4_000
"""What the encoder is checked on: parts looked into, bytes of text from each, characters of each text."""


def check_encoder(shop: Workshop, parts: Sequence[Part], progress: bool) -> bool:
    """Compare the fast encoder with the vocabulary's own on texts from a few places of the input.

    Returns:
        Whether they differ, so that the tokenizer is another now, which encodes with its own.
    """
    step = max(len(parts) // SAMPLE_PARTS, 1)
    sample: list[str] = []
    unweighted = shop.settings.fields.weights
    for number, part in enumerate(parts[::step][:SAMPLE_PARTS]):
        block = next(shop.recipe.blocks(part, shop.settings.on_damage([])), None)
        if number == 0 and progress and isinstance(shop.recipe, ChatRecipe):
            _tell_settings(shop.recipe, block, part)
        if isinstance(block, RecordBlock) and block.weights is not None and block.weights.present.any():
            unweighted = None
        size = 0
        for text in shop.recipe.sample(block) if block is not None else []:
            sample.append(text[:SAMPLE_TEXT])
            size += len(sample[-1])
            if size >= SAMPLE_BYTES:
                break
    if unweighted is not None and sample and progress:
        say(f"warning: no record looked at has the field {unweighted!r} of --weights-field: is it spelled so?")
    reason = shop.tokenizer.check_encoder(sample)
    if reason and progress:
        say(f"encoding with {shop.tokenizer.encoder}, which is slower: {reason}")
    return reason is not None


def _tell_settings(recipe: ChatRecipe, block: Block | None, part: Part) -> None:
    first = None
    if isinstance(block, ObjectBlock) and len(block):
        first = block.objects[0], f"{part.files[block.files[0]]}:{block.lines[0]}"
    for line in chat_notices(recipe.encoder, recipe.chat, first):
        say(line)


def checked_first(shop: Workshop, parts: Iterator[Part], progress: bool) -> Iterator[Part]:
    """Parts as they come, after a look at the first of them.

    Raises:
        RecordError: There is none.
    """
    first = next(parts, None)
    if first is None:
        raise RecordError("the source gave no record; due: at least one text or dict")
    check_encoder(shop, [first], progress)
    yield first
    yield from parts


def say(line: str) -> None:
    """Tell people something, on standard error."""
    print(f"penstock: {visible(line, lines=True)}", file=sys.stderr)
