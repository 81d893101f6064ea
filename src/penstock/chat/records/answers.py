"""Records with several answers to a prompt: better and worse ones, ranked lists, good and bad ones,
trees.

`read_record` reads one answer of such a record, the best. Here all are read, each as a conversation
of its own, with what the record says about them. Only the answers are trained: messages that all of
them begin with are not.

| record | answers |
|---|---|
| preference pair | `chosen` and `rejected`, in every form that the layout `preference` knows |
| rejected answer | `rejected_response` or `rejected_messages`, next to any record with a good one |
| ranked list | `prompt` and `responses` (or `completions`, `answers`) with `scores`, more is better, or `ranks` |
| two conversations | `conversation_a`, `conversation_b` and `winner`: model_a, model_b, or a tie |
| labelled answer | `prompt`, `completion` and `label`: true or false (KTO) |
| OASST tree | `oasst_paths: ranked`: a set for each message with several ranked replies; else its paths, unranked |
"""  # noqa: E501

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from penstock.chat.records.conversation import Conversation, MessageWeights
from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.layouts import (
    detect_layout,
    message_field,
    read_nodes,
    read_record,
    with_lists,
)
from penstock.chat.records.preference_records import RESPONSES
from penstock.chat.records.trees import Node, replies_of, root_of
from penstock.core.errors import ConversationError
from penstock.core.json_values import JsonMapping, JsonObject

LISTS = ("responses", "completions", "answers")
SCORES, RANKS = ("scores", "ratings"), ("ranks", "ranking")
_NOT_TRAINED = MessageWeights(train=False)
_WINNERS = {"model_a": (0.0, 1.0), "model_b": (1.0, 0.0), "a": (0.0, 1.0), "b": (1.0, 0.0)}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSet:
    """Conversations that begin alike. Where nothing is said of them, they are only stored
    together.
    """

    conversations: tuple[Conversation, ...]
    ranks: tuple[float, ...] | None = None
    """0 is the best; equal ranks make no pair. None: not ranked."""
    label: float | None = None
    """1: the answer is good, 0: it is bad; then there is one. None: not labelled."""
    shared: int = 0
    """Messages at the beginning that are the prompt."""

    @property
    def compared(self) -> bool:
        """Whether answers are ranked or labelled: their sums of log-probabilities are what is
        trained.
        """
        return self.ranks is not None or self.label is not None

    def mismatched(self, other: "AnswerSet") -> Conversation:
        """The prompt of this set with the answer of another (KTO's reference point)."""
        mine, theirs = self.conversations[0], other.conversations[0]
        return replace(
            mine,
            messages=mine.messages[: self.shared] + theirs.messages[other.shared :],
            message_weights=mine.message_weights[: self.shared]
            + theirs.message_weights[other.shared :],
        )


def answers_layout(record: JsonMapping, settings: LayoutSettings, origin: str) -> str:
    """Name of the record's layout; one of those above that `detect_layout` does not know is
    `ranked`.
    """
    record = with_lists(record, settings)
    if _is_arena(record) or _list_field(record, settings) is not None:
        return "ranked"
    return detect_layout(record, settings, origin)


def read_answers(record: JsonMapping, settings: LayoutSettings, origin: str) -> list[AnswerSet]:
    """Read all answers of a record.

    Raises:
        ConversationError: A message cannot be read, an answer is missing or empty, or ranks do not
            fit the answers.
    """
    record = with_lists(record, settings)
    if _is_arena(record):
        return [_arena(record, settings, origin)]
    name = _list_field(record, settings)
    if name is not None:
        return [_ranked_list(record, name, settings, origin)]
    layout = detect_layout(record, settings, origin)
    if layout == "oasst" and settings.oasst_paths == "ranked":
        root = root_of(record)
        return [] if root is None else list(_ranked_replies(record, root, settings, origin))
    if layout == "preference":
        return [_pair(record, settings, origin)]
    if (other := _with_rejected(record, layout, settings)) is not None:
        return [
            _compared(
                [read_record(one, settings, origin) for one in (record, other)], (0.0, 1.0), origin
            )
        ]
    label = next((record[name] for name in settings.name("label") if name in record), None)
    if layout == "prompt_completion" and label is not None:
        return [_labelled(record, label, settings, origin)]
    read = read_record(record, settings, origin)
    return [AnswerSet(conversations=tuple(read) if isinstance(read, list) else (read,))]


def _pair(record: JsonMapping, settings: LayoutSettings, origin: str) -> AnswerSet:
    rejected = next(
        (record[name] for name in settings.name("rejected") if record.get(name) is not None), None
    )
    if rejected is None:
        raise ConversationError(
            f'{origin}: no "rejected" answer next to the chosen one; name its field (fields: '
            f"{{rejected: …}}), or set "
            "answers: best to train the chosen answers alone"
        )
    chosen = next(name for name in settings.name("chosen") if record.get(name) is not None)
    sides = [
        read_record({**record, chosen: value}, settings, origin)
        for value in (record[chosen], rejected)
    ]
    return _compared(sides, (0.0, 1.0), origin)


def _with_rejected(record: JsonMapping, layout: str, settings: LayoutSettings) -> JsonObject | None:
    """The record with its rejected answer in place of the good one, as ms-swift writes pairs; None:
    it has none.
    """
    messages, answer = record.get("rejected_messages"), record.get("rejected_response")
    field = message_field(record, settings)
    if field is not None and messages is not None:
        return {**record, field: messages}
    if answer is None:
        return None
    if field is not None:
        last = max(
            (n for n, one in enumerate(record[field]) if isinstance(one, Mapping)), default=0
        )
        said = [{**record[field][last], settings.dialect(layout).content_key: answer}]
        return {
            **record,
            field: [*record[field][:last], *(said if isinstance(answer, str) else answer)],
        }
    names = (
        settings.name("completion", *RESPONSES)
        if layout == "prompt_completion"
        else settings.name("output", *RESPONSES)
    )
    name = next((name for name in names if record.get(name) is not None), None)
    return None if name is None else {**record, name: answer}


def _ranked_list(
    record: JsonMapping, name: str, settings: LayoutSettings, origin: str
) -> AnswerSet:
    answers = record[name]
    rest = {
        key: value for key, value in record.items() if key not in (*LISTS, *SCORES, *RANKS, name)
    }
    completion = settings.fields.get("completion", "completion")
    given = next(
        (
            (key, True)
            for key in settings.name("scores", *SCORES[1:])
            if record.get(key) is not None
        ),
        None,
    )
    given = given or next(
        ((key, False) for key in settings.name("ranks", *RANKS[1:]) if record.get(key) is not None),
        None,
    )
    if given is None:
        raise ConversationError(
            f'{origin}: "{name}" has {len(answers)} answers without "scores" or "ranks"'
        )
    key, more_is_better = given
    numbers = record[key]
    if (
        not isinstance(numbers, list)
        or len(numbers) != len(answers)
        or not all(map(_is_number, numbers))
    ):
        raise ConversationError(
            f'{origin}: "{key}" is {numbers!r:.60}; expected a number for each of '
            f"{len(answers)} answers"
        )
    signed = [-float(number) if more_is_better else float(number) for number in numbers]
    order = sorted(set(signed))
    read = [read_record({**rest, completion: answer}, settings, origin) for answer in answers]
    return _compared(read, tuple(float(order.index(number)) for number in signed), origin)


def _arena(record: JsonMapping, settings: LayoutSettings, origin: str) -> AnswerSet:
    winner = str(record["winner"])
    if winner not in _WINNERS:
        raise ConversationError(
            f'{origin}: "winner" is {winner!r:.40}, so neither conversation is better than '
            "the other"
        )
    rest = {
        key: value
        for key, value in record.items()
        if key not in ("conversation_a", "conversation_b", "winner")
    }
    read = [
        read_record({**rest, "messages": record[name]}, settings, origin)
        for name in ("conversation_a", "conversation_b")
    ]
    return _compared(read, _WINNERS[winner], origin)


def _ranked_replies(
    record: JsonMapping, root: Node, settings: LayoutSettings, origin: str
) -> Iterator[AnswerSet]:
    """A set for each message with several ranked replies of the assistant."""
    stack = [[root]]
    while stack:
        path = stack.pop()
        replies = replies_of(path[-1])
        stack += [[*path, reply] for reply in reversed(replies)]
        ranked = [
            reply
            for reply in replies
            if reply.get("role") == "assistant" and _is_number(reply.get("rank"))
        ]
        if len(ranked) > 1:
            read = [read_nodes(record, [*path, reply], settings, origin) for reply in ranked]
            yield _compared(read, tuple(float(reply["rank"]) for reply in ranked), origin)


def _labelled(
    record: JsonMapping, label: object, settings: LayoutSettings, origin: str
) -> AnswerSet:
    if label not in (0, 1):
        raise ConversationError(f'{origin}: "label" is {label!r:.40}; expected true or false')
    name = next(name for name in settings.name("label") if name in record)
    read = read_record({**record, name: True}, settings, origin)
    assert isinstance(read, Conversation)
    shared = 1 + max(
        (at for at, one in enumerate(read.messages) if one["role"] == "user"), default=-1
    )
    found = _compared([read], None, origin, shared)
    return replace(found, label=float(label))


def _compared(
    read: Sequence[Any], ranks: tuple[float, ...] | None, origin: str, shared: int | None = None
) -> AnswerSet:
    """Conversations whose common beginning is not trained."""
    if shared is None:
        shared = 0
        most = min(len(one.messages) for one in read)
        while shared < most and all(
            one.messages[shared] == read[0].messages[shared] for one in read
        ):
            shared += 1
        if all(len(one.messages) == shared for one in read):
            raise ConversationError(f"{origin}: all answers are the same, so none is better")
    conversations = []
    for one in read:
        answer = one.messages[shared:]
        if not answer:
            raise ConversationError(
                f"{origin}: an answer is empty: the other goes on after {shared} equal messages"
            )
        for message in answer:
            said = message.get("content")
            if (
                message["role"] == "assistant"
                and not message.get("tool_calls")
                and not (said and str(said).strip())
            ):
                raise ConversationError(f"{origin}: an answer is empty; remove the record")
        weights = (_NOT_TRAINED,) * shared + one.message_weights[shared:]
        conversations.append(replace(one, message_weights=weights))
    return AnswerSet(conversations=tuple(conversations), ranks=ranks, shared=shared)


def _is_arena(record: JsonMapping) -> bool:
    return "winner" in record and "conversation_a" in record


def _list_field(record: JsonMapping, settings: LayoutSettings) -> str | None:
    """The field of a list of answers; a list of messages is none."""
    found = (
        name
        for name in settings.name("responses", *LISTS[1:])
        if isinstance(record.get(name), list)
    )
    return next((name for name in found if not _is_messages(record[name])), None)


def _is_messages(items: Sequence[object]) -> bool:
    return (
        bool(items) and isinstance(items[0], Mapping) and ("role" in items[0] or "from" in items[0])
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
