"""What a preparation found out about chats: added up over conversations, then over parts, then told."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, final

import numpy as np

from penstock.chat import EncodedChat
from penstock.chat.certificate import Kind
from penstock.chat.cleaning import DROPPING, Counts

MEANINGS: dict[Kind, str] = {
    "nothing_trained": "no token would be trained",
    "missing_terminator": "a trained turn has no terminator, so the model would not learn to stop",
    "unterminated": "a trained turn has no terminator",
    "not_written": "the template leaves out a message that is to be trained",
    "foreign_text": "words of a message that is not trained would be trained",
    "untraced": "trained words are written where no turn can be followed",
    "unsupplied_header": "the template begins a reply with a header that its generation prompt does not supply",
    "escaped": "the template escapes quotes and brackets of messages",
    "control_text": "a message of a trained role holds control text in its own words",
    "rewritten": "the template writes an earlier reply differently once more follows",
    "context_differs": "the text before a reply is not what the model is prompted with",
    "dropped": "the template leaves out a part of the messages, so that part is not in the dataset",
    "opening_differs": "a reply begins differently from the generation prompt",
    "disagreement": "another method would train other tokens",
    "empty_reply": "a trained reply says nothing",
    "forged": "messages hold control text, which was encoded as ordinary text",
}
"""What each kind of problem means for a conversation."""

TEMPLATE = "(template)"
"""What stands for a role where a token is in no message's turn."""


@final
@dataclass(slots=True, kw_only=True)
class RoleCounts:
    """Tokens in the turns of one role."""

    messages: int = 0
    tokens: int = 0
    trained: int = 0
    """Tokens from the second of each document on whose loss weight is not 0."""


@final
@dataclass(slots=True, kw_only=True)
class TerminatorCounts:
    """How often one text ended a turn."""

    seen: int = 0
    trained: int = 0
    is_control: bool = True
    """Whether it is one control token of the tokenizer; a template of another model's writes its own as plain text."""


@final
@dataclass(slots=True, kw_only=True)
class ProblemCounts:
    """Conversations with one kind of problem."""

    conversations: int = 0
    is_error: bool = False
    example: str = ""
    """The first of them, with file and line."""


@final
@dataclass(slots=True, kw_only=True)
class ChatSummary:
    """Figures of some conversations; those of rejected records count among the problems only."""

    cleaned: Counts = field(default_factory=Counts)
    dropped: dict[str, str] = field(default_factory=dict)
    """Rule of the clean-up that dropped conversations → where the first of them is."""
    layouts: dict[str, int] = field(default_factory=dict)
    """Layout → records."""
    documents: int = 0
    roles: dict[str, RoleCounts] = field(default_factory=dict)
    terminators: dict[str, TerminatorCounts] = field(default_factory=dict)
    problems: dict[Kind, ProblemCounts] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)
    """What another method said of the mask → documents."""
    straddling_tokens: int = 0
    forged: int = 0
    """Control text in messages that stayed text."""
    typed: int = 0
    """Control text in messages that became control tokens, because the settings said so."""

    def add_documents(self, chats: Sequence[EncodedChat], control: Collection[str]) -> None:
        """Count documents that go into the dataset; `control` are the tokenizer's control tokens."""
        self.documents += len(chats)
        self._add_roles(chats)
        endings = Counter((text, trained) for chat in chats for _, text, trained in chat.certificate.terminators)
        for (text, trained), count in endings.items():
            ending = self.terminators.setdefault(text, TerminatorCounts(is_control=text in control))
            ending.seen += count
            ending.trained += count * trained
        _add_counts(self.checks, Counter(check for chat in chats for check in chat.certificate.checks))
        self.straddling_tokens += sum(len(chat.certificate.straddling) for chat in chats)
        self.forged += sum(len(chat.certificate.forged) for chat in chats)
        self.typed += sum(len(chat.certificate.typed) for chat in chats)

    def _add_roles(self, chats: Sequence[EncodedChat]) -> None:
        """Count the tokens of each role, of all documents at once."""
        if not chats:
            return
        numbers: dict[str, int] = {TEMPLATE: 0}
        roles: list[int] = []  # number of the role of "no message", then of each message, document after document
        firsts = []
        for chat in chats:
            firsts.append(len(roles))
            roles.append(0)
            roles += [numbers.setdefault(role, len(numbers)) for role in chat.roles]
        owners = np.concatenate([chat.messages for chat in chats]) + 1
        owners += np.repeat(firsts, [len(chat.tokens) for chat in chats])
        owner_roles = np.array(roles)[owners]
        counted = np.concatenate([chat.loss_weights for chat in chats]) != 0
        counted[np.cumsum([0, *(len(chat.tokens) for chat in chats[:-1])])] = False
        tokens = np.bincount(owner_roles, minlength=len(numbers)).tolist()
        trained = np.bincount(owner_roles[counted], minlength=len(numbers)).tolist()
        messages = np.bincount(roles, minlength=len(numbers)).tolist()
        messages[0] = 0
        for name, number in numbers.items():
            entry = self.roles.setdefault(name, RoleCounts())
            entry.messages += messages[number]
            entry.tokens += tokens[number]
            entry.trained += trained[number]

    def add_cleaned(self, counts: Iterable[tuple[str, Counts]]) -> None:
        """Count what the clean-up did; each with the origin of its record."""
        found = list(counts)
        for origin, one in found:
            if one.dropped:
                for rule in DROPPING:
                    if getattr(one, rule):
                        self.dropped.setdefault(rule, origin)
        for one, times in Counter(one for _, one in found).items():
            scaled = {name.name: times * getattr(one, name.name) for name in fields(Counts)}
            self.cleaned = self.cleaned + Counts(**scaled)

    def add_problems(self, chats: Sequence[EncodedChat], origin: str) -> None:
        """Count the problems of one conversation, each kind once."""
        problems = [problem for chat in chats for problem in chat.certificate.problems]
        for problem in {problem.kind: problem for problem in reversed(problems)}.values():
            entry = self.problems.setdefault(problem.kind, ProblemCounts())
            entry.conversations += 1
            entry.is_error = problem.is_error
            entry.example = entry.example or f"{origin}: {problem}"

    def add(self, other: "ChatSummary") -> None:
        """Count all that another counted."""
        self.cleaned = self.cleaned + other.cleaned
        self.dropped = other.dropped | self.dropped
        self.documents += other.documents
        self.straddling_tokens += other.straddling_tokens
        self.forged += other.forged
        self.typed += other.typed
        _add_counts(self.layouts, other.layouts)
        _add_counts(self.checks, other.checks)
        for role, counts in other.roles.items():
            entry = self.roles.setdefault(role, RoleCounts())
            entry.messages += counts.messages
            entry.tokens += counts.tokens
            entry.trained += counts.trained
        for text, endings in other.terminators.items():
            ending = self.terminators.setdefault(text, TerminatorCounts(is_control=endings.is_control))
            ending.seen += endings.seen
            ending.trained += endings.trained
        for kind, problem in other.problems.items():
            first = self.problems.setdefault(kind, ProblemCounts(is_error=problem.is_error, example=problem.example))
            first.conversations += problem.conversations

    @classmethod
    def total(cls, parts: Iterable[dict[str, Any] | None]) -> "ChatSummary":
        """The sum over parts, each as JSON."""
        whole = cls()
        for part in parts:
            if part is not None:
                whole.add(cls.from_json(part))
        return whole

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ChatSummary":
        """What `as_json` gave."""
        return cls(
            **{
                **value,
                "cleaned": Counts(**value["cleaned"]),
                "roles": {name: RoleCounts(**counts) for name, counts in value["roles"].items()},
                "terminators": {name: TerminatorCounts(**counts) for name, counts in value["terminators"].items()},
                "problems": {name: ProblemCounts(**counts) for name, counts in value["problems"].items()},
            }
        )

    def lines(self) -> list[str]:
        """For people."""
        layouts = ", ".join(f"{name} {count:,}" for name, count in self.layouts.items())
        lines = [f"conversations: {'; '.join(self.cleaned.lines(self.dropped))} (layout: {layouts})"]
        tokens, trained = (sum(getattr(role, name) for role in self.roles.values()) for name in ("tokens", "trained"))
        lines.append(f"trained: {trained:,} of {tokens:,} tokens, {_share(trained, tokens)}")
        lines.append(f"{'role':>16} {'messages':>10} {'tokens':>12} {'trained':>12}")
        for name, role in self.roles.items():
            share = _share(role.trained, role.tokens)
            lines.append(f"{name:>16} {role.messages:>10,} {role.tokens:>12,} {role.trained:>12,} {share}")
        endings = (
            f"{text!r} {ending.seen:,} (trained {ending.trained:,})" for text, ending in self.terminators.items()
        )
        lines.append(f"terminators: {', '.join(endings) or 'none'}")
        plain = [repr(text) for text, ending in self.terminators.items() if not ending.is_control]
        if plain:
            lines.append(
                f"warning: no control token of this tokenizer, so plain text: {', '.join(plain)}; is the template that "
                "of another model?"
            )
        lines += [f"cross-check: {check}: {count:,} of {self.documents:,}" for check, count in self.checks.items()]
        for kind, problem in self.problems.items():
            fate = "rejected" if problem.is_error else "kept"
            count = f"{problem.conversations:,} conversation{'s' * (problem.conversations != 1)}"
            lines.append(f"{count} {fate}: {MEANINGS[kind]} ({kind}); the first: {problem.example}")
        if self.forged:
            lines.append(f"control text in messages that was encoded as text: {self.forged:,}")
        if self.typed:
            lines.append(f"control text in messages that became control tokens: {self.typed:,}")
        return lines


def _add_counts(mine: dict[str, int], theirs: Mapping[str, int]) -> None:
    for name, count in theirs.items():
        mine[name] = mine.get(name, 0) + count


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"
