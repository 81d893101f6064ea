"""Conversations of raw files as they would be trained, for people to look at before anything is prepared.

Nothing is left out in silence: a record that cannot be read, a conversation that the template refuses or in which
nothing is trained is shown with the reason. Costs one pass over the input, and about a millisecond a conversation.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, final

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock.chat import (
    ChatEncoder,
    Conversation,
    Knobs,
    LayoutSettings,
    Template,
    describe_layout,
    detect_family,
    read_conversation,
)
from penstock.chat.cleaning import clean
from penstock.errors import ConfigError, PenstockError, RecordError, TokenizerError
from penstock.inspection.html import Note, PageData, PageDocument, from_chat
from penstock.inspection.html.terminal import conversation_view, legend
from penstock.inspection.samples import RawRecord, Sample
from penstock.inspection.terminal import Style
from penstock.inspection.text import token_texts
from penstock.progress import Progress
from penstock.tokenizers import Tokenizer

REFUSED = "refused"
SHOW_PROGRESS_RECORDS = 1000
"""Fewer are encoded before a bar would be of use."""
NAMED = 5
"""Refused conversations that a terminal names."""
REFUSED_CHARACTERS = 4000
"""Of a record that was refused, so much is shown."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShownConversations:
    """Some conversations of an input, encoded or refused."""

    documents: tuple[tuple[PageDocument, ...], ...]
    """What each record became; several where the layout or the settings make several of one."""
    total: int
    """Records of the whole input."""
    layout: str
    """What the records were taken for, and why."""
    encoder: ChatEncoder

    @property
    def flat(self) -> list[PageDocument]:
        """All documents."""
        return [document for record in self.documents for document in record]

    @property
    def refused(self) -> list[PageDocument]:
        """Those that would not be trained."""
        return [document for document in self.flat if document.ok is False]


def knobs_from(assignments: Sequence[str], option: str) -> Knobs:
    """Settings from `name=value`, the value as YAML; a list may be written `user,assistant`.

    Args:
        assignments: As given, in order; the last of a name holds.
        option: What the user calls them, for messages.

    Raises:
        ConfigError: There is no such setting, or it cannot have that value.
    """
    import yaml

    chosen: dict[str, Any] = {}
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign or name not in Knobs.__dataclass_fields__:
            known = ", ".join(Knobs.__dataclass_fields__)
            raise ConfigError(f"{option} {assignment}: due: name=value, where the name is one of {known}")
        if name == "roles_to_train":
            chosen[name] = tuple(role.strip() for role in text.strip("[] ").split(",") if role.strip())
            continue
        value = yaml.safe_load(text)
        default = getattr(Knobs(), name)
        if isinstance(default, bool) and not isinstance(value, bool):
            raise ConfigError(f"{option} {assignment}: due: true or false")
        # YAML takes "none" for text, which is what the settings call it.
        chosen[name] = value
    return Knobs(**chosen)


def show_conversations(
    sample: Sample, tokenizer: Tokenizer, template: Template, knobs: Knobs, layout: LayoutSettings | None = None
) -> ShownConversations:
    """Encode records as prepare does, and keep what is refused with its reason.

    Args:
        sample: The records.
        tokenizer: The tokenizer.
        template: The chat template.
        knobs: What is trained.
        layout: How records become conversations.
    """
    layout = layout or LayoutSettings()
    encoder = ChatEncoder(tokenizer, template, knobs)
    shown = []
    with Progress("encoding", total=len(sample.records), enabled=len(sample.records) > SHOW_PROGRESS_RECORDS) as bar:
        for record in sample.records:
            shown.append(tuple(_documents(record, encoder, layout)))
            bar.advance(1)
    return ShownConversations(
        documents=tuple(shown), total=sample.total, layout=_layout(sample, layout), encoder=encoder
    )


def page_of_conversations(title: str, shown: ShownConversations, other: ShownConversations | None = None) -> PageData:
    """The page of conversations, beside the same under other settings where these are given.

    Args:
        title: Of the page.
        shown: The conversations.
        other: The same records under other settings.
    """
    documents = shown.flat
    right = None
    if other is not None:
        pairs = [
            pair
            for mine, theirs in zip(shown.documents, other.documents, strict=True)
            for pair in zip_longest(mine, theirs)
        ]
        documents = [mine or _absent(theirs) for mine, theirs in pairs]
        ours, theirs = changed_settings(shown.encoder.knobs, other.encoder.knobs)
        right = PageData(
            title=title,
            label=theirs,
            settings=settings_of(other),
            documents=[theirs or _absent(mine) for mine, theirs in pairs],
        )
    return PageData(
        title=title,
        label="" if right is None else ours,
        settings=settings_of(shown),
        summary=summary_of(shown),
        documents=documents,
        other=right,
    )


def conversations_view(
    shown: ShownConversations, style: Style, count: int, max_tokens: int, other: ShownConversations | None = None
) -> Group:
    """Some of the conversations for a terminal, then the figures, and what is refused.

    Args:
        shown: The conversations.
        style: How the terminal shows what is trained.
        count: Conversations that are shown in full, spread over all.
        max_tokens: Tokens of each that are shown, at most.
        other: The same records under other settings, shown after each.
    """
    parts: list[Any] = []
    ours, theirs = ("", "") if other is None else changed_settings(shown.encoder.knobs, other.encoder.knobs)
    for number in spread(count, len(shown.documents)):
        for label, side in ((ours, shown), (theirs, other)):
            if side is not None:
                parts += [Text(f"── {label}", style="bold reverse")] if label else []
                parts += [conversation_view(document, style, max_tokens) for document in side.documents[number]]
    if parts:
        parts += [legend(style), Text()]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in {**settings_of(shown), **summary_of(shown)}.items():
        table.add_row(name, str(value))
    parts.append(table)
    for document in shown.refused[:NAMED]:
        parts.append(Text(f"✗ {document.origin}: {_reason(document)}", style="red"))
    if len(shown.refused) > NAMED:
        parts.append(Text(f"… and {len(shown.refused) - NAMED:,} more; --html shows them all", style="red"))
    return Group(*parts)


def conversations_as_json(shown: ShownConversations) -> dict[str, Any]:
    """Settings, figures and reasons as plain values, for a machine."""
    return {
        "settings": settings_of(shown),
        "summary": summary_of(shown),
        "refused": [{"origin": document.origin, "reason": _reason(document)} for document in shown.refused],
    }


def summary_of(shown: ShownConversations) -> dict[str, Any]:
    """Counts over the conversations that are shown, in words."""
    documents = shown.flat
    tokens = sum(len(document.ids) for document in documents)
    trained = sum(document.trained for document in documents)
    kinds = Counter(kind for document in documents for kind in {note[0] for note in document.notes})
    records = f"{len(shown.documents):,}"
    if len(shown.documents) < shown.total:
        records += f" of {shown.total:,}, spread over the input"
    if len(documents) != len(shown.documents):
        records += f"; they became {len(documents):,} documents"
    return {
        "conversations": records,
        "layout": shown.layout,
        "tokens": f"{tokens:,}",
        "trained": f"{trained:,} ({trained / max(1, tokens):.1%})",
        "proven": f"{len(documents) - len(shown.refused):,}",
        "refused": f"{len(shown.refused):,}",
        **{f"with a note: {kind}": f"{count:,}" for kind, count in kinds.most_common() if kind != REFUSED},
    }


def changed_settings(knobs: Knobs, other: Knobs) -> tuple[str, str]:
    """What to call two settings beside each other: by what differs."""
    names = [name for name in Knobs.__dataclass_fields__ if getattr(knobs, name) != getattr(other, name)]
    sides = (", ".join(f"{name}={_short(getattr(side, name))}" for name in names) for side in (knobs, other))
    return tuple(sides) if names else ("these settings", "the same settings")  # type: ignore[return-value]


def _documents(record: RawRecord, encoder: ChatEncoder, layout: LayoutSettings) -> Iterator[PageDocument]:
    """What one record becomes: documents with their certificates, or the reason for which it is refused."""
    title = f"conversation {record.number}"
    if record.value is None:
        yield _refused(title, record.origin, record.problem, [("", record.excerpt)], encoder.tokenizer)
        return
    try:
        read = read_conversation(record.value, layout, record.origin)
    except RecordError as error:
        text = json.dumps(record.value, ensure_ascii=False, indent=1, default=str)
        yield _refused(title, record.origin, str(error), [("", text)], encoder.tokenizer)
        return
    several = read if isinstance(read, list) else [read]
    for number, conversation in enumerate(several):
        name = title if len(several) == 1 else f"{title} path {number}"
        try:
            yield from _encoded(name, conversation, encoder)
        except (RecordError, TokenizerError) as error:
            yield _refused(name, record.origin, str(error), _said(conversation), encoder.tokenizer)


def _encoded(title: str, conversation: Conversation, encoder: ChatEncoder) -> Iterator[PageDocument]:
    knobs = encoder.knobs
    kept, counts = clean(conversation, roles_to_train=knobs.roles_to_train, train_on_inputs=knobs.train_on_inputs)
    if kept is None:
        what = "no messages, or no reply to any" if counts.empty else "no message that the settings train"
        yield _refused(title, conversation.origin, f"dropped: {what}", _said(conversation), encoder.tokenizer)
        return
    more = []
    if counts.trimmed:
        more.append(Note("trimmed", f"{counts.trimmed_messages} messages at the end, which no reply follows"))
    chats = encoder.encode(kept)
    if not chats:
        yield _refused(title, conversation.origin, "no reply of it can be trained", _said(kept), encoder.tokenizer)
    for number, chat in enumerate(chats):
        page = from_chat(
            chat,
            title=title if len(chats) == 1 else f"{title} reply {number}",
            origin=conversation.origin,
            special_tokens=encoder.tokenizer.special_tokens,
        )
        errors = [str(problem) for problem in chat.certificate.problems if problem.is_error]
        if errors:
            more.append(Note(REFUSED, "; ".join(errors)))
        yield replace(page, notes=(*page.notes, *more))


def _refused(
    title: str, origin: str, reason: str, texts: Sequence[tuple[str, str]], tokenizer: Tokenizer
) -> PageDocument:
    """A document in which nothing is trained: the words of the record, and why it is refused."""
    names = tuple(dict.fromkeys(role for role, _ in texts if role))
    ids: list[int] = []
    roles: list[int] = []
    turns: list[int] = []
    left = REFUSED_CHARACTERS
    for turn, (role, text) in enumerate(texts):
        found = tokenizer.encode(text[:left]).tolist() if left > 0 else []
        left -= len(text)
        ids += found
        roles += [names.index(role) if role else -1] * len(found)
        turns += [turn] * len(found)
    reason = reason.removeprefix(f"{origin}: ")
    return PageDocument(
        title=title,
        origin=origin,
        pieces=token_texts(tokenizer, ids, lines=True),
        ids=np.array(ids, np.int64),
        loss_weights=np.zeros(len(ids), np.float32),
        roles=np.array(roles, np.int64),
        role_names=names,
        turns=np.array(turns, np.int64),
        notes=(Note(REFUSED, reason),),
        ok=False,
    )


def _reason(document: PageDocument) -> str:
    return "; ".join(note[1] for note in document.notes if note[0] == REFUSED)


def _absent(other: PageDocument) -> PageDocument:
    """Stands where the other settings have one more document."""
    nothing = np.zeros(0, np.int64)
    return PageDocument(
        title=other.title,
        origin=other.origin,
        pieces=(),
        ids=nothing,
        loss_weights=nothing.astype(np.float32),
        notes=(Note("absent", "these settings make no such document"),),
    )


def _said(conversation: Conversation) -> list[tuple[str, str]]:
    """(role, text) of each message; what is no text as JSON."""
    said = []
    for message in conversation.messages:
        content = message.get("content")
        rest = {name: value for name, value in message.items() if name not in ("role", "content")}
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        text += f"\n{json.dumps(rest, ensure_ascii=False, default=str)}" if rest else ""
        said.append((str(message["role"]), f"{text}\n"))
    return said


def settings_of(shown: ShownConversations) -> dict[str, Any]:
    """The settings that made them, each as it is in force."""
    encoder = shown.encoder
    family = detect_family(encoder.template.source)
    return {
        "tokenizer": encoder.tokenizer.name,
        "template": encoder.template.name,
        "family": "not one that is known" if family is None else f"{family.name} ({family.title})",
        **{name: _short(value) for name, value in encoder.knobs.describe().items()},
    }


def _layout(sample: Sample, settings: LayoutSettings) -> str:
    """Of the first record that has one; and of how many others there are, where they differ."""
    found: Counter[str] = Counter()
    for record in sample.records:
        try:
            found[describe_layout(record.value or {}, settings, record.origin)] += 1
        except PenstockError:
            found["none that is known"] += 1
    lines = [f"{line}{f' ({count:,})' if len(found) > 1 else ''}" for line, count in found.most_common()]
    return "; ".join(line.removeprefix("layout ") for line in lines)


def spread(count: int, total: int) -> list[int]:
    """At most `count` of the numbers below `total`, evenly spread."""
    return [total * place // count for place in range(count)] if count < total else list(range(total))


def _short(value: Any) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
