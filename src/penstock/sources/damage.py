"""Files that cannot be read to their end: cut, damaged, or changed while they were read.

Such a file is no bad record, because nobody knows how many records are lost with it. It stops the work, unless the
caller counts what was lost and goes on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from penstock.errors import DamagedFileError


class Unreadable(Exception):  # noqa: N818  (never seen by users: a reader turns it into a Damage)
    """The rest of a file cannot be read.

    Args:
        reason: In words.
        position: Bytes of the file, as it lies in its store, that were read before.
        cut: Only the end is missing, so that all that comes before it is right.
    """

    def __init__(self, reason: str, position: int = 0, *, cut: bool = False) -> None:
        super().__init__(reason)
        self.position, self.cut = position, cut


@final
@dataclass(frozen=True, slots=True)
class Damage:
    """A stretch of a file that cannot be read."""

    file: str
    line: int
    """Where reading ended: the first line (from 1) or row (from 0) that was not read."""
    reason: str
    size_bytes: int
    """Bytes that were to be read: of the file, or of the range of it that a part is."""
    unread_bytes: int
    """Bytes of these that no record came from. What is missing at the end of a file that was cut is not counted: how
    much it was, the file does not say."""

    def __str__(self) -> str:
        read = self.size_bytes - self.unread_bytes
        return (
            f"{self.file}:{self.line}: the file cannot be read further: {self.reason} "
            f"({read:,} of {self.size_bytes:,} bytes were read)"
        )


OnDamage = Callable[[Damage], Any]
"""Called for each stretch that cannot be read; when it returns, the reader goes on behind the stretch."""


def stop_at_damage(damage: Damage) -> None:
    """Refuse to go on without a part of the input.

    Raises:
        DamagedFileError: Always.
    """
    raise DamagedFileError(
        f"{damage}; copy the file again, or go on without what cannot be read: --on-damaged-file skip"
    )
