"""Statistics about chats: summed over conversations, then over parts, then reported."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import final

import numpy as np

from penstock.chat import EncodedChat
from penstock.chat.masks.certificate import Kind, Problem
from penstock.chat.records.cleaning import DROPPING, Counts
from penstock.chat.records.unread import cure_of
from penstock.core.json_values import JsonObject

MEANINGS: dict[Kind, str] = {
    "nothing_trained": "no token would be trained",
    "missing_terminator": "a trained turn has no terminator, so the model would not learn to stop",
    "unterminated": "a trained turn has no terminator",
    "not_written": "the template leaves out a message that should be trained",
    "foreign_text": "words of a message that is not trained would be trained",
    "untraced": "trained words are written where no turn can be traced",
    "unsupplied_header": (
        "the template begins a reply with a header that its generation prompt does not supply"
    ),
    "escaped": "the template escapes quotes and brackets of messages",
    "control_text": "a message of a trained role holds control text in its own words",
    "rewritten": "the template writes an earlier reply differently once more follows",
    "context_differs": "the text before a reply is not what the model is prompted with",
    "dropped": "the template leaves out a part of the messages, so that part is not in the dataset",
    "opening_differs": "a reply begins differently from the generation prompt",
    "disagreement": "another method would train other tokens",
    "empty_reply": "a trained reply says nothing",
    "merged_prompt": (
        "the tokenizer merges the end of a prompt with the reply, so the ids differ from the "
        "prompt's"
    ),
    "result_order": (
        "results of tools come in another order than their calls, and the template writes no ids"
    ),
    "unread": "nothing reads a field whose name means something",
    "forged": "messages hold control text, which was encoded as ordinary text",
}
"""Kind of problem → what it means for a conversation."""

SHOWN_FIELDS = 20
"""Fields without a reader that the report names."""

TEMPLATE = "(template)"
"""Role of a token that belongs to no message's turn."""


@final
@dataclass(slots=True, kw_only=True)
class RoleCounts:
    """Tokens in the turns of one role."""

    messages: int = 0
    tokens: int = 0
    trained: int = 0
    """Tokens with a loss weight other than 0, without the first token of each document."""


@final
@dataclass(slots=True, kw_only=True)
class TerminatorCounts:
    """How often one text ended a turn."""

    seen: int = 0
    trained: int = 0
    is_control: bool = True
    """Whether it is one control token of the tokenizer; the template of another model writes its
    own as plain text.
    """


@final
@dataclass(slots=True, kw_only=True)
class ProblemCounts:
    """Conversations with one kind of problem."""

    conversations: int = 0
    is_error: bool = False
    example: str = ""
    """The first one, with file and line."""


@final
@dataclass(slots=True, kw_only=True)
class ChatSummary:
    """Statistics of some conversations; those of rejected records count only among the problems."""

    cleaned: Counts = field(default_factory=Counts)
    dropped: dict[str, str] = field(default_factory=dict)
    """Rule of the clean-up that dropped conversations → place of the first one."""
    layouts: dict[str, int] = field(default_factory=dict)
    """Layout → number of records."""
    unread: dict[str, int] = field(default_factory=dict)
    """Field of records or messages that nothing reads → number of records that have it."""
    nulls: dict[str, int] = field(default_factory=dict)
    """Place in records → nulls that a columnar format had added there, which were removed."""
    documents: int = 0
    roles: dict[str, RoleCounts] = field(default_factory=dict)
    terminators: dict[str, TerminatorCounts] = field(default_factory=dict)
    problems: dict[Kind, ProblemCounts] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)
    """Result of another method that checks the mask → number of documents."""
    straddling_tokens: int = 0
    forged: int = 0
    """Occurrences of control text in messages that stayed text."""
    typed: int = 0
    """Occurrences of control text in messages that became control tokens, as the settings say."""
    trees: dict[str, int] = field(default_factory=dict)
    """Documents, paths, pairs, examples, stored tokens, tokens of all paths, and documents whose
    paths share nothing, where answers are kept.
    """
    images: dict[str, int] = field(default_factory=dict)
    """Images, their tokens, slots and patches, and documents compared with the processor's own
    encoding.
    """

    def add_documents(self, chats: Sequence[EncodedChat], control: Collection[str]) -> None:
        """Count documents of the dataset; `control` are the tokenizer's control tokens."""
        self.documents += len(chats)
        self._add_roles(chats)
        endings = Counter(
            (text, trained) for chat in chats for _, text, trained in chat.certificate.terminators
        )
        for (text, trained), count in endings.items():
            ending = self.terminators.setdefault(
                text, TerminatorCounts(is_control=text.strip() in control)
            )
            ending.seen += count
            ending.trained += count * trained
        _add_counts(
            self.checks, Counter(check for chat in chats for check in chat.certificate.checks)
        )
        self.straddling_tokens += sum(len(chat.certificate.straddling) for chat in chats)
        self.forged += sum(len(chat.certificate.forged) for chat in chats)
        self.typed += sum(len(chat.certificate.typed) for chat in chats)
        for image, place in (one for chat in chats for one in chat.images):
            counts = {
                "images": 1,
                "tokens": place.end - place.begin,
                **({"shrunk": 1} if image.is_shrunk else {}),
            }
            _add_counts(
                self.images,
                {**counts, "slots": place.layout.slots, "patches": place.layout.patches},
            )

    def add_unread(self, names: Mapping[str, int]) -> None:
        """Count fields that nothing reads, given with the number of their records."""
        _add_counts(self.unread, names)

    def add_nulls(self, places: Mapping[str, int]) -> None:
        """Count nulls that a columnar format had added, and that were removed."""
        _add_counts(self.nulls, places)

    def add_verified(self, documents: int) -> None:
        """Count documents that equal the processor's own encoding of text and images together."""
        if documents:
            _add_counts(self.images, {"verified": documents})

    def _add_roles(self, chats: Sequence[EncodedChat]) -> None:
        """Count the tokens of each role, for all documents at once."""
        if not chats:
            return
        numbers: dict[str, int] = {TEMPLATE: 0}
        roles: list[
            int
        ] = []  # for each document: the role of "no message", then of each message, as numbers
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

    def add_cleaned(self, found: Sequence[tuple[str, Counts]]) -> None:
        """Count what the clean-up did, given with the origin of each record."""
        for origin, one in found:
            if one.dropped:
                for rule in DROPPING:
                    if getattr(one, rule):
                        self.dropped.setdefault(rule, origin)
        for one, times in Counter(one for _, one in found).items():
            scaled = {name.name: times * getattr(one, name.name) for name in fields(Counts)}
            self.cleaned = self.cleaned + Counts(**scaled)

    def add_problems(self, problems: Sequence[Problem], origin: str, *, rejected: bool) -> None:
        """Count the problems of one record, each kind once; of a rejected one only the errors, for
        which it is.
        """
        if rejected:
            problems = [problem for problem in problems if problem.is_error]
        for problem in {problem.kind: problem for problem in reversed(problems)}.values():
            entry = self.problems.setdefault(problem.kind, ProblemCounts())
            entry.conversations += 1
            entry.is_error = problem.is_error
            entry.example = entry.example or f"{origin}: {problem}"

    def add(self, other: "ChatSummary") -> None:
        """Add another summary."""
        self.cleaned = self.cleaned + other.cleaned
        self.dropped = other.dropped | self.dropped
        self.documents += other.documents
        self.straddling_tokens += other.straddling_tokens
        self.forged += other.forged
        self.typed += other.typed
        _add_counts(self.layouts, other.layouts)
        _add_counts(self.unread, other.unread)
        _add_counts(self.nulls, other.nulls)
        _add_counts(self.trees, other.trees)
        _add_counts(self.images, other.images)
        _add_counts(self.checks, other.checks)
        for role, counts in other.roles.items():
            entry = self.roles.setdefault(role, RoleCounts())
            entry.messages += counts.messages
            entry.tokens += counts.tokens
            entry.trained += counts.trained
        for text, endings in other.terminators.items():
            ending = self.terminators.setdefault(
                text, TerminatorCounts(is_control=endings.is_control)
            )
            ending.seen += endings.seen
            ending.trained += endings.trained
        for kind, problem in other.problems.items():
            first = self.problems.setdefault(
                kind, ProblemCounts(is_error=problem.is_error, example=problem.example)
            )
            first.conversations += problem.conversations

    @classmethod
    def total(cls, parts: Iterable[JsonObject | None]) -> "ChatSummary":
        """The sum over parts, each as JSON."""
        whole = cls()
        for part in parts:
            if part is not None:
                whole.add(cls.from_json(part))
        return whole

    def as_json(self) -> JsonObject:
        """The summary as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: JsonObject) -> "ChatSummary":
        """The inverse of `as_json`."""
        return cls(
            **{
                **value,
                "cleaned": Counts(**value["cleaned"]),
                "roles": {name: RoleCounts(**counts) for name, counts in value["roles"].items()},
                "terminators": {
                    name: TerminatorCounts(**counts)
                    for name, counts in value["terminators"].items()
                },
                "problems": {
                    name: ProblemCounts(**counts) for name, counts in value["problems"].items()
                },
            }
        )

    def lines(self) -> list[str]:
        """The summary as text."""
        trees = self.trees
        layouts = ", ".join(f"{name} {count:,}" for name, count in self.layouts.items())
        lines = [
            f"conversations: {'; '.join(self.cleaned.lines(self.dropped))} (layout: {layouts})"
        ]
        if trees:
            said = [f"{trees[name]:,} {name}" for name in ("pairs", "examples") if trees[name]]
            if trees["apart"]:
                said.append(f"{trees['apart']:,} share no beginning")
            counted = "".join(f", {one}" for one in said)
            lines.append(
                f"answers: {trees['paths']:,} in {trees['documents']:,} documents{counted}; "
                f"{trees['stored']:,} tokens stored for {trees['tokens']:,}"
            )
        if self.images:
            images = {"verified": 0, **self.images}
            smaller = f"{images['shrunk']:,} of them made smaller, " if "shrunk" in images else ""
            lines.append(
                f"images: {images['images']:,}, {smaller}in {images['tokens']:,} tokens, "
                f"{images['slots']:,} of them slots; {images['patches']:,} patches; "
                f"{images['verified']:,} documents compared with the processor's own"
            )
        tokens, trained = (
            sum(getattr(role, name) for role in self.roles.values())
            for name in ("tokens", "trained")
        )
        lines.append(f"trained: {trained:,} of {tokens:,} tokens, {_share(trained, tokens)}")
        lines.append(f"{'role':>16} {'messages':>10} {'tokens':>12} {'trained':>12}")
        for name, role in self.roles.items():
            share = _share(role.trained, role.tokens)
            lines.append(
                f"{name:>16} {role.messages:>10,} {role.tokens:>12,} {role.trained:>12,} {share}"
            )
        endings = (
            f"{text!r} {ending.seen:,} (trained {ending.trained:,})"
            for text, ending in self.terminators.items()
        )
        lines.append(f"terminators: {', '.join(endings) or 'none'}")
        plain = [repr(text) for text, ending in self.terminators.items() if not ending.is_control]
        if plain:
            lines.append(
                "warning: plain text, because this tokenizer has no such control token: "
                f"{', '.join(plain)}; does the template belong to another model?"
            )
        lines += self._check_lines()
        for kind, problem in self.problems.items():
            if (
                not problem.is_error and kind != "unread"
            ):  # rejected records have a table of reasons
                count = (
                    f"{problem.conversations:,} conversation{'s' * (problem.conversations != 1)}"
                )
                # These conversations were not dropped.
                name = "" if kind == "dropped" else f" ({kind})"
                lines.append(f"{count} kept: {MEANINGS[kind]}{name}; the first: {problem.example}")
        if self.unread:
            most = sorted(self.unread.items(), key=lambda one: -one[1])
            shown = ", ".join(f"{name} {count:,}" for name, count in most[:SHOWN_FIELDS])
            more = f" and {len(most) - SHOWN_FIELDS} more" if len(most) > SHOWN_FIELDS else ""
            lines.append(f"fields that nothing reads: {shown}{more}")
            meant = [(name, cure) for name, _ in most if (cure := cure_of(name)) is not None]
            lines += [f"warning: {name} has no effect; {cure}" for name, cure in meant]
        if self.nulls:
            places = ", ".join(
                f"{place} {count:,}"
                for place, count in Counter(self.nulls).most_common(SHOWN_FIELDS)
            )
            lines.append(f"nulls of the columnar format, removed: {places}")
        if self.forged:
            lines.append(f"control text in messages that was encoded as text: {self.forged:,}")
        if self.typed:
            lines.append(f"control text in messages that became control tokens: {self.typed:,}")
        return lines

    def _check_lines(self) -> list[str]:
        """How many documents each other method agreed with, and why the rest were not compared."""
        lines, compared = [], Counter[str]()
        for check, count in self.checks.items():
            compared[check.rpartition(" ")[0]] += count
            lines.append(f"cross-check: {check}: {count:,} of {self.documents:,}")
        rest = self.documents - max(compared.values(), default=self.documents)
        if rest:
            lines.append(
                f"cross-check: {rest:,} not compared: other parts than all of the assistant's "
                "turns are trained (by settings, flags, or one reply alone), or a message "
                "holds control text"
            )
        return lines


def _add_counts(mine: dict[str, int], theirs: Mapping[str, int]) -> None:
    for name, count in theirs.items():
        mine[name] = mine.get(name, 0) + count


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"
