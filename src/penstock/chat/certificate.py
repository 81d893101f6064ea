"""What was found out about one conversation: what is trained, what the template dropped, and what stands against it."""

from dataclasses import dataclass
from typing import Literal, final

from penstock.chat.conversation import Form

Kind = Literal[
    "nothing_trained",
    "missing_terminator",
    "unterminated",
    "not_written",
    "foreign_text",
    "rewritten",
    "context_differs",
    "dropped",
    "opening_differs",
    "disagreement",
    "empty_reply",
    "forged",
    "control_text",
    "untraced",
    "unsupplied_header",
    "escaped",
]
ERRORS: frozenset[Kind] = frozenset(
    (
        "nothing_trained",
        "missing_terminator",
        "not_written",
        "foreign_text",
        "untraced",
        "unsupplied_header",
        "control_text",
    )
)
"""Kinds that stand against training a conversation; the others are told."""


@final
@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a reader should know about one message (−1: the whole conversation)."""

    kind: Kind
    message: int
    text: str

    @property
    def is_error(self) -> bool:
        """Whether it stands against training the conversation."""
        return self.kind in ERRORS

    def __str__(self) -> str:
        return self.text if self.message < 0 else f"message {self.message}: {self.text}"


@final
@dataclass(frozen=True, slots=True)
class Dropped:
    """Characters [begin, end) of a field that the template left out."""

    message: int
    field: str
    begin: int
    end: int
    text: str

    @property
    def is_blank(self) -> bool:
        """Whether it is whitespace only, which templates trim."""
        return not self.text.strip()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The proof for one conversation: trained text is the words of the chosen messages, wrappers and terminators."""

    terminators: tuple[tuple[int, str, bool], ...]
    """(message, text of its terminator, whether it is trained)."""
    dropped: tuple[Dropped, ...]
    """What of the messages is not in the text."""
    straddling: tuple[int, ...]
    """Tokens that hold characters of different weights; each has the weight of its last character."""
    forged: tuple[tuple[int, str], ...]
    """Control text that messages spelled and that stayed text: (character, text)."""
    checks: tuple[str, ...]
    """Methods that agreed or disagreed with the mask: "generation tags agree", "boundaries of qwen disagree"."""
    problems: tuple[Problem, ...]
    changed: tuple[Form, ...] = ()
    """What was changed of the messages because the template fails on them as the record has them."""
    typed: tuple[tuple[int, str], ...] = ()
    """Control text that messages spelled and that became control tokens, as the settings say: (character, text)."""

    @property
    def ok(self) -> bool:
        """Whether nothing stands against training the conversation."""
        return not any(problem.is_error for problem in self.problems)
