"""What a template leaves out of the messages: texts, calls, results, tools."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from penstock.chat.masks.certificate import Dropped, Kind, Problem
from penstock.chat.masks.evidence import Evidence
from penstock.chat.render.traced_text import GIVEN, Run
from penstock.core.json_values import JsonMapping


def unwritten_messages(evidence: Evidence) -> set[int]:
    """Messages without a turn and without any text in the render."""
    written = {words.message for words in evidence.rendered.words}
    return set(range(len(evidence.conversation.messages))) - written - evidence.turns.keys()


def says_something(message: JsonMapping) -> bool:
    """Whether a message has text or tool calls."""
    return bool(message.get("tool_calls")) or any(words.strip() for _, words in _words(message))


def check_words(evidence: Evidence, dropped: Sequence[Dropped]) -> Iterator[Problem]:
    """Report what the template did not write: messages, parts of them, or the tools."""
    unwritten = unwritten_messages(evidence)
    if evidence.conversation.tools and not any(run[1] == GIVEN for run in evidence.rendered.runs):
        yield Problem("dropped", -1, "the template writes none of the tools")
    for part in dropped:
        if part.is_blank or _is_rewritten_tag(evidence, part):
            continue
        message = evidence.conversation.messages[part.message]
        whole = part.begin == 0 and part.end == _length(message, part.field)
        shown = part.text if len(part.text) <= 40 else part.text[:40] + "…"
        if calls := part.field == "tool_calls":
            report = "the template writes none of its tool calls"
        else:
            report = f"the template leaves out {shown!r} of its {part.field}"
        if whole and part.field != "reasoning_content" and part.message in evidence.mask.trained:
            if part.message not in unwritten:
                rest = "; take one that does" if calls else ": all of it"
                yield Problem("not_written", part.message, report + rest)
        else:
            yield Problem("dropped", part.message, report)


def check_structure(evidence: Evidence, dropped: Sequence[Dropped]) -> Iterator[Problem]:
    """Check that calls of trained messages, and results before a trained message, are written as
    they are.
    """
    trained, last = set(evidence.mask.trained), max(evidence.mask.trained, default=-1)
    # Of these it is reported once that nothing is written.
    silent = (unwritten_messages(evidence) & trained) | {
        part.message for part in dropped if part.field == "tool_calls"
    }
    for message, where, text, _ in evidence.rendered.lost:
        if message not in silent:
            needed = message in trained or (where == "result" and message < last)
            kind: Kind = "unsupplied_header" if where == "stop" else "not_written"
            yield Problem(kind if needed else "dropped", message, text)
    for message, call in _misplaced_calls(evidence, trained - silent):
        name = evidence.conversation.messages[message]["tool_calls"][call]["function"]["name"]
        yield Problem(
            "untraced",
            message,
            f"the template writes call {call} ({name}) where the model does not produce it",
        )


def _misplaced_calls(evidence: Evidence, messages: Collection[int]) -> list[tuple[int, int]]:
    """(message, call) of calls whose name is nowhere in what the model produces in a turn."""
    found: dict[tuple[int, int], bool] = {}
    at = 0
    for length, message, field, _, owner, _ in evidence.rendered.runs:
        path = field.split(".") if message in messages and field.endswith(".function.name") else ()
        if len(path) == 4:
            turn = evidence.turns.get(message if owner is None or owner < 0 else owner)
            inside = turn is not None and any(begin <= at < end for begin, end in turn.produced)
            found[message, int(path[1])] = found.get((message, int(path[1])), False) or inside
        at += length
    return [call for call, inside in found.items() if not inside]


def _is_rewritten_tag(evidence: Evidence, part: Dropped) -> bool:
    """Whether only a thinking tag is missing, which the template writes itself."""
    turn, tag = evidence.turns.get(part.message), part.text.strip()
    if turn is None or tag not in ("<think>", "</think>"):
        return False
    return any(tag in evidence.rendered.text[begin:end] for begin, end in turn.pieces)


def find_dropped(evidence: Evidence) -> Iterator[Dropped]:
    """Stretches of the messages that are not in the text."""
    runs = evidence.rendered.runs
    whole = {run[:4] for run in runs}
    written: dict[tuple[int, str], list[tuple[int, int]]] = {}
    calling: set[int] | None = None
    for number, message in enumerate(evidence.conversation.messages):
        for field, text in _words(message):
            if text and (len(text), number, field, 0) not in whole:
                written = written or _spans_by_field(runs)
                yield from _missing(number, field, text, sorted(written.get((number, field), [])))
        if message.get("tool_calls"):
            calling = (
                {run[1] for run in runs if run[2].startswith("tool_calls")}
                if calling is None
                else calling
            )
            if number not in calling:
                yield Dropped(number, "tool_calls", 0, 1, "tool calls")


def _spans_by_field(runs: Sequence[Run]) -> dict[tuple[int, str], list[tuple[int, int]]]:
    """Message and field → the spans of it that were written; for all, as each alone would look at
    all runs.
    """
    written: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for length, number, field, offset, _, _ in runs:
        if number >= 0:
            written.setdefault((number, field), []).append((offset, offset + length))
    return written


def _missing(
    message: int, field: str, text: str, spans: Sequence[tuple[int, int]]
) -> Iterator[Dropped]:
    """The parts of a text between its written spans; none if the offset of a span is unknown."""
    if spans and spans[0][0] < 0:
        return
    at = 0
    for begin, end in [*spans, (len(text), len(text))]:
        if begin > at:
            yield Dropped(message, field, at, begin, text[at:begin])
        at = max(at, end)


def _words(message: JsonMapping) -> Iterator[tuple[str, str]]:
    """Path and text of everything that a message says."""
    content = message.get("content")
    if isinstance(content, str):
        yield "content", content
    elif isinstance(content, (list, tuple)):
        for place, part in enumerate(content):
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                yield f"content.{place}.text", part["text"]
    reasoning = next(
        (
            message[name]
            for name in ("reasoning_content", "thinking", "reasoning")
            if message.get(name)
        ),
        "",
    )
    if isinstance(reasoning, str):
        yield "reasoning_content", reasoning


def _length(message: JsonMapping, field: str) -> int:
    return next((len(text) for name, text in _words(message) if name == field), 1)
