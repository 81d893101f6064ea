"""Sources of which no document can be trained: found in the lengths, when the loader is made.

Each step would have a loss denominator of 0, for ever. `target_watch` finds what lengths do not
say.
"""

from typing import Any

from penstock.core.errors import ConfigError

_FIRST_LOOK, _LONGEST_LOOK = 1 << 10, 1 << 20
"""Documents that are looked at together: few at first, as nearly always one of them will do."""


def require_targets(
    where: str, lengths: Any, documents: tuple[int, int], longest: int | None, *, by_weights: bool
) -> None:
    """Refuse a source if its lengths say that none of its documents can be trained.

    Reads lengths up to the first document that can; all of them only where none can.

    Args:
        where: The source, for the message.
        lengths: Tokens and trained tokens of all documents [n, 2]; [n, 1] where all but the first
            are trained. An array or `LazyNumbers`.
        documents: The first of its documents, and the one after the last.
        longest: Documents of more tokens are dropped; None: none are.
        by_weights: Whether targets are the trained tokens; else any document with tokens may have
            some.

    Raises:
        ConfigError: None can.
    """
    (begin, end), count = documents, _FIRST_LOOK
    while begin < end:
        part = lengths[begin : min(begin + count, end)]
        usable = part[:, 0] > 0
        if by_weights:
            usable = part[:, 1] > 0 if part.shape[1] > 1 else part[:, 0] > 1
        if longest is not None:
            usable &= part[:, 0] <= longest
        if usable.any():
            return
        begin, count = begin + count, min(2 * count, _LONGEST_LOOK)
    reasons = (
        "is empty, has one token only, or has loss weight 0 on all others"
        if by_weights
        else "is empty"
    )
    if longest is not None:
        reasons += f", or is longer than {longest} tokens with too_long='drop'"
    raise ConfigError(
        f"{where}: nothing can be trained: each of its {end - documents[0]} documents "
        f"{reasons}; prepare it with other loss weights or longer documents, or leave the "
        "source out"
    )
