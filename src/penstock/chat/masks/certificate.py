"""Certificate of one conversation: what it trains, what the template dropped, and which problems
were found.
"""

from dataclasses import dataclass
from typing import Literal, final, get_args

from penstock.chat.records.conversation import Form

ErrorKind = Literal[
    "nothing_trained",
    "missing_terminator",
    "not_written",
    "foreign_text",
    "untraced",
    "unsupplied_header",
    "control_text",
]
ReportKind = Literal[
    "unterminated",
    "rewritten",
    "context_differs",
    "dropped",
    "opening_differs",
    "disagreement",
    "empty_reply",
    "forged",
    "escaped",
    "unread",
    "merged_prompt",
    "result_order",
]
Kind = Literal[ErrorKind, ReportKind]
ERRORS: frozenset[Kind] = frozenset(get_args(ErrorKind))
"""Kinds of problems that are errors; the others are only reported."""


@final
@dataclass(frozen=True, slots=True)
class Problem:
    """A finding about one message (−1: the whole conversation)."""

    kind: Kind
    message: int
    text: str

    @property
    def is_error(self) -> bool:
        """Whether the conversation must not be trained."""
        return self.kind in ERRORS

    def __str__(self) -> str:
        return self.text if self.message < 0 else f"message {self.message}: {self.text}"


@final
@dataclass(frozen=True, slots=True)
class Dropped:
    """Characters [begin, end) of a field that the template did not write."""

    message: int
    field: str
    begin: int
    end: int
    text: str

    @property
    def is_blank(self) -> bool:
        """Whether it is only whitespace, which templates trim."""
        return not self.text.strip()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Proof that the trained text of a conversation is the chosen messages' text, wrappers and
    terminators.
    """

    terminators: tuple[tuple[int, str, bool], ...]
    """(message, text of its terminator, whether it is trained)."""
    dropped: tuple[Dropped, ...]
    """Parts of the messages that are not in the text."""
    straddling: tuple[int, ...]
    """Tokens with characters of different weights; each has the weight of its last character."""
    forged: tuple[tuple[int, str], ...]
    """Control text in messages that stayed text: (character, text)."""
    checks: tuple[str, ...]
    """Methods that agreed or disagreed with the mask: "generation tags agree", "boundaries of qwen
    disagree".
    """
    problems: tuple[Problem, ...]
    changed: tuple[Form, ...] = ()
    """Changes to the messages, because the template cannot render them as the record has them."""
    unread: tuple[str, ...] = ()
    """Fields of the record and its messages (`messages[].name`) that nothing reads."""
    typed: tuple[tuple[int, str], ...] = ()
    """Control text in messages that became control tokens, because the settings allow it:
    (character, text).
    """

    @property
    def ok(self) -> bool:
        """Whether no problem is an error."""
        return not any(problem.is_error for problem in self.problems)

    def __str__(self) -> str:
        """A few lines: the verdict, which turns are trained with their ends, what the second
        methods say, problems.
        """
        lines = ["proven: only what the settings train is trained" if self.ok else "refused"]
        for trained, verb in ((True, "trained"), (False, "only read")):
            found = [
                (message, text)
                for message, text, is_trained in self.terminators
                if is_trained == trained
            ]
            if found:
                texts = " ".join(dict.fromkeys(text.replace("\n", "⏎") for _, text in found))
                messages = ", ".join(str(message) for message, _ in found)
                noun = "message" if len(found) == 1 else "messages"
                lines.append(f"ends {verb}: {texts} of {noun} {messages}")
        lines += [f"cross-check: {check}" for check in self.checks]
        lines += [
            f"{'error' if problem.is_error else 'reported'}: {problem}" for problem in self.problems
        ]
        return "\n".join(lines)
