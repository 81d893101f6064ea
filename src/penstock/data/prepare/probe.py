"""Checks a sample of the input before it is prepared: whether the fast encoder is right, and what
to report to users.

Reports go to standard error, one line each: what needs attention if progress is shown, settings if
`verbose` is set.
"""

import sys
from collections.abc import Iterator, Sequence

from penstock.core.errors import RecordError
from penstock.core.terminal import visible
from penstock.data.prepare.chat_notices import chat_notices
from penstock.data.prepare.part import Workshop
from penstock.data.prepare.recipe import Block, ChatRecipe
from penstock.data.sources import ObjectBlock, Part, RecordBlock

SAMPLE_PARTS = 4
"""Parts of which a sample is taken for checking the encoder."""


def check_encoder(shop: Workshop, parts: Sequence[Part], progress: bool, verbose: bool) -> bool:
    """Compare the fast encoder with the vocabulary's own on texts from a few places of the input.

    Args:
        shop: The preparation.
        parts: The input.
        progress: Report what needs attention.
        verbose: Report the settings of chats too.

    Returns:
        Whether they differ; the tokenizer then encodes with its own encoder from now on.
    """
    step = max(len(parts) // SAMPLE_PARTS, 1)
    sample: list[str] = []
    unweighted = shop.settings.fields.weights
    for number, part in enumerate(parts[::step][:SAMPLE_PARTS]):
        block = next(shop.recipe.blocks(part, shop.settings.on_damage([])), None)
        if number == 0 and verbose and isinstance(shop.recipe, ChatRecipe):
            _report_settings(shop.recipe, block, part)
        if (
            isinstance(block, RecordBlock)
            and block.weights is not None
            and block.weights.present.any()
        ):
            unweighted = None
        if block is not None:
            sample += shop.recipe.sample(block)
    if unweighted is not None and sample and progress:
        say(
            f"warning: no sampled record has the field {unweighted!r}, which weights_field "
            "names; check its spelling"
        )
    has_switched = shop.tokenizer.check_encoder(sample) is not None
    if shop.tokenizer.fallback_reason and progress:
        say(
            f"encoding with {shop.tokenizer.encoder}, slower and with the same ids: "
            f"{shop.tokenizer.fallback_reason}"
        )
    return has_switched


def _report_settings(recipe: ChatRecipe, block: Block | None, part: Part) -> None:
    first = None
    if isinstance(block, ObjectBlock) and len(block):
        first = block.objects[0], f"{part.files[block.files[0]]}:{block.lines[0]}"
    for line in chat_notices(recipe.encoder, recipe.chat, first):
        say(line)


def checked_first(
    shop: Workshop, parts: Iterator[Part], progress: bool, verbose: bool
) -> Iterator[Part]:
    """Parts as they come, after checking the encoder on the first.

    Raises:
        RecordError: There is none.
    """
    first = next(parts, None)
    if first is None:
        raise RecordError(
            "the source gave no record; expected: at least one text or dict (a generator gives "
            "nothing more once it was read)"
        )
    check_encoder(shop, [first], progress, verbose)
    yield first
    yield from parts


def say(line: str) -> None:
    """Print a line for the user on standard error."""
    print(f"penstock: {visible(line, lines=True)}", file=sys.stderr)
