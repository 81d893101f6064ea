"""The certificate of a conversation: what is trained is held against the message it comes from, and other methods.

Nothing here decides what is trained. Costs: some microseconds a turn, besides what `prompting.py` renders.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.chat.certificate import Certificate, Dropped, Kind, Problem
from penstock.chat.conversation import Conversation
from penstock.chat.encoded_text import EncodedText
from penstock.chat.knobs import Knobs
from penstock.chat.masks import Mask
from penstock.chat.prompting import check_prompts
from penstock.chat.template import Rendered, Template
from penstock.chat.traced import GIVEN
from penstock.chat.turns import Turn, place_of
from penstock.chat.typed_control_text import Authors, check_control_text, find_typed

_MARKER = re.compile(r"<\S+>|\[\S+\]")
"""Text that can only be meant for a control token."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One conversation with all that was made of it."""

    conversation: Conversation
    rendered: Rendered
    turns: Mapping[int, Turn]
    encoded: EncodedText
    authors: Authors
    mask: Mask
    knobs: Knobs
    scanned: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    """Tokens that the role boundaries of the template's family train, bool [tokens]; None: there are none."""
    family: str = ""
    """Name of that family."""
    appended: str | None = None
    """The EOS that is appended to the last turn, as text; None: none is."""


def certify(evidence: Evidence, template: Template) -> Certificate:
    """Check a conversation; `template` rendered it, and renders what would be prompted."""
    dropped = tuple(_find_dropped(evidence))
    checks: list[str] = []
    roles = [message["role"] for message in evidence.conversation.messages]
    problems = [
        *_check_turns(evidence),
        *_check_words(evidence, dropped),
        *_check_foreign(evidence),
        *check_prompts(evidence.conversation, evidence.rendered.text, evidence.turns, evidence.mask.trained, template),
        *_check_escapes(evidence.rendered),
        *check_control_text(evidence.rendered, evidence.encoded, evidence.authors, roles, evidence.knobs),
        *_check_methods(evidence, checks),
    ]
    weights = evidence.mask.tokens
    if evidence.appended is None and not (weights[1:] != 0).any():
        problems.append(Problem("nothing_trained", -1, "no token is trained"))
    text = evidence.rendered.text
    terminators = [
        (message, text[begin:end], bool(evidence.mask.characters[end - 1]))
        for message, (begin, end) in sorted(evidence.mask.terminators.items())
    ]
    if evidence.appended is not None:
        terminators.append((evidence.mask.trained[-1], evidence.appended, True))
    return Certificate(
        terminators=tuple(terminators),
        dropped=dropped,
        straddling=tuple(np.flatnonzero(evidence.mask.straddling).tolist()),
        forged=evidence.encoded.forged,
        checks=tuple(checks),
        problems=tuple(problems),
        changed=evidence.conversation.changed,
        typed=find_typed(evidence.rendered, evidence.encoded, evidence.authors),
    )


def _check_turns(evidence: Evidence) -> Iterator[Problem]:
    """Each trained message is written; its turn opens as it would be prompted, says something, and ends."""
    knobs, messages = evidence.knobs, evidence.conversation.messages
    unwritten = _unwritten(evidence)
    for message in evidence.mask.trained:
        if message in unwritten and (_says_something(messages[message]) or messages[message]["role"] == "assistant"):
            cure = "; drop_system_message: true leaves it out" if messages[message]["role"] == "system" else ""
            yield Problem("not_written", message, f"the template writes nothing of this message{cure}")
        turn = evidence.turns.get(message)
        if turn is None:
            continue
        if turn.header:
            yield Problem(
                "unsupplied_header",
                message,
                f"the template begins the turn with {turn.header!r}, which its generation prompt does not supply, so "
                "the model would learn to write it; take a template that prompts as it writes",
            )
        if turn.supplied != turn.opening and messages[message]["role"] == "assistant":
            yield Problem(
                "opening_differs",
                message,
                f"the generation prompt is {turn.opening!r}, but the turn begins with {turn.supplied!r}",
            )
        if _is_empty(messages[message], turn, evidence.rendered.text):
            yield Problem("empty_reply", message, "it says nothing, so at most its end is trained")
        wanted = knobs.train_on_eos != "none" or (knobs.train_on_eot or "none") != "none"
        # A system message is read, not written by turns: nothing stops behind it.
        ends = wanted and messages[message]["role"] not in ("system", "developer")
        if knobs.on_missing_terminator != "allow" and ends and not knobs.train_on_inputs:
            yield from _check_terminator(evidence, message)


def _unwritten(evidence: Evidence) -> set[int]:
    """Messages without a turn and without words in the text."""
    written = {words.message for words in evidence.rendered.words}
    return set(range(len(evidence.conversation.messages))) - written - evidence.turns.keys()


def _says_something(message: Mapping[str, Any]) -> bool:
    """Whether a message has words or calls."""
    return bool(message.get("tool_calls")) or any(words.strip() for _, words in _words(message))


def _is_empty(message: Mapping[str, Any], turn: Turn, text: str) -> bool:
    """Whether a message has no words or calls, and the template writes none for it (of parts of other types)."""
    spans = [(begin, min(end, turn.words_end)) for begin, end in turn.produced]
    return not _says_something(message) and not any(text[begin:end].strip() for begin, end in spans)


def _check_terminator(evidence: Evidence, message: int) -> Iterator[Problem]:
    """A trained turn ends with something that the model can learn to write: a control token, or ordinary text.

    Where EOS is to be appended, which only the last turn can have, it is told of the others.
    """
    is_error = evidence.knobs.on_missing_terminator == "error"
    kind: Kind = "missing_terminator" if is_error else "unterminated"
    if message not in evidence.mask.terminators:
        if evidence.appended is None or message != evidence.mask.trained[-1]:
            cure = (
                "on_missing_terminator: append or allow"
                if is_error
                else "EOS can be appended to the last turn only; mask_history trains only that"
            )
            yield Problem(
                kind,
                message,
                f"the template ends the turn without a terminator, so the model would not learn to stop; {cure}",
            )
        return
    begin, end = evidence.mask.terminators[message]
    text, encoded = evidence.rendered.text[begin:end], evidence.encoded
    if _MARKER.fullmatch(text) and not encoded.is_control[(encoded.begins >= begin) & (encoded.ends <= end)].any():
        yield Problem(
            kind,
            message,
            f"its terminator {text!r} is no control token of this tokenizer: is the template that of another model? "
            "on_missing_terminator: allow takes it for text",
        )


def _check_words(evidence: Evidence, dropped: Sequence[Dropped]) -> Iterator[Problem]:
    """What the template left out: whole messages, parts, or the tools."""
    unwritten = _unwritten(evidence)
    if evidence.conversation.tools and not any(run[1] == GIVEN for run in evidence.rendered.runs):
        yield Problem("dropped", -1, "the template writes none of the tools")
    for part in dropped:
        if part.is_blank or _is_rewritten_tag(evidence, part):
            continue
        message = evidence.conversation.messages[part.message]
        whole = part.begin == 0 and part.end == _length(message, part.field)
        shown = part.text if len(part.text) <= 40 else part.text[:40] + "…"
        told = f"the template leaves out {shown!r} of its {part.field}"
        if whole and part.field != "reasoning_content" and part.message in evidence.mask.trained:
            if part.message not in unwritten:
                yield Problem("not_written", part.message, f"{told}: all of it")
        else:
            yield Problem("dropped", part.message, told)


def _is_rewritten_tag(evidence: Evidence, part: Dropped) -> bool:
    """Whether only a thinking tag was cut out, which the template writes itself."""
    turn, tag = evidence.turns.get(part.message), part.text.strip()
    if turn is None or tag not in ("<think>", "</think>"):
        return False
    return any(tag in evidence.rendered.text[begin:end] for begin, end in turn.pieces)


def _find_dropped(evidence: Evidence) -> Iterator[Dropped]:
    """Stretches of the messages' words that are not in the text."""
    runs = evidence.rendered.runs
    whole = {run[:4] for run in runs}
    for number, message in enumerate(evidence.conversation.messages):
        for field, text in _words(message):
            if text and (len(text), number, field, 0) not in whole:
                spans = sorted((run[3], run[3] + run[0]) for run in runs if run[1:3] == (number, field))
                yield from _missing(number, field, text, spans)
        if message.get("tool_calls") and not any(run[1] == number and run[2].startswith("tool_calls") for run in runs):
            yield Dropped(number, "tool_calls", 0, 1, "tool calls")


def _missing(message: int, field: str, text: str, spans: Sequence[tuple[int, int]]) -> Iterator[Dropped]:
    """What lies between the spans of a text that were written; nothing when some are not known by offset."""
    if spans and spans[0][0] < 0:
        return
    at = 0
    for begin, end in [*spans, (len(text), len(text))]:
        if begin > at:
            yield Dropped(message, field, at, begin, text[at:begin])
        at = max(at, end)


def _words(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Path and text of what a message says."""
    content = message.get("content")
    if isinstance(content, str):
        yield "content", content
    elif isinstance(content, (list, tuple)):
        for place, part in enumerate(content):
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                yield f"content.{place}.text", part["text"]
    reasoning = next(
        (message[name] for name in ("reasoning_content", "thinking", "reasoning") if message.get(name)), ""
    )
    if isinstance(reasoning, str):
        yield "reasoning_content", reasoning


def _length(message: Mapping[str, Any], field: str) -> int:
    return next((len(text) for name, text in _words(message) if name == field), 1)


def _check_foreign(evidence: Evidence) -> Iterator[Problem]:
    """Words of a message that is not trained must not be trained, and those of a reply must stand in a turn."""
    if evidence.knobs.train_on_inputs:
        return
    characters, trained = evidence.mask.characters, set(evidence.mask.trained)
    roles = [message["role"] for message in evidence.conversation.messages]
    for words in evidence.rendered.words:
        begin, end, message, field, _ = words
        if not field.startswith(("content", "reasoning_content")):
            continue
        place = place_of(words, evidence.turns)
        if message not in trained:
            ranged = bool(evidence.conversation.marks[message].ranges)
            if not ranged and characters[begin:end].any():
                shown = evidence.rendered.text[begin : min(end, begin + 40)]
                yield Problem(
                    "foreign_text", message, f"the template writes {shown!r} where message {place} is trained"
                )
        elif roles[message] == "assistant" and (place is None or roles[place] != "assistant"):
            yield Problem(
                "untraced",
                message,
                "the template writes its text where no turn can be followed, neither by the loop over the messages nor "
                "by what the template prompts with; take a template that writes each reply behind its prompt",
            )


def _check_escapes(rendered: Rendered) -> Iterator[Problem]:
    if rendered.escaped:
        yield Problem(
            "escaped",
            -1,
            f"Jinja escapes quotes and brackets ({rendered.escaped} characters more), because the template adds text "
            "with + behind |safe or |e; a ~ b in place of a + b does not",
        )


def _check_methods(evidence: Evidence, checks: list[str]) -> Iterator[Problem]:
    """Hold the mask against the template's `{% generation %}` tags, and the role boundaries of its family."""
    if not _is_plain(evidence):
        return
    if evidence.mask.generated is not None:
        yield from _compare("generation tags", evidence.mask.generated, evidence, checks)
    if evidence.scanned is not None and not evidence.encoded.forged:
        yield from _compare(f"boundaries of {evidence.family}", evidence.scanned, evidence, checks)


def _is_plain(evidence: Evidence) -> bool:
    """Whether the settings ask for what the other methods give: whole turns of assistants."""
    knobs = evidence.knobs
    usual = knobs.train_on_eos == "turn" and knobs.train_on_eot in (None, "turn") and knobs.train_on_reasoning
    chosen = knobs.roles_to_train == ("assistant",) and not knobs.train_on_inputs and not knobs.mask_history
    unmarked = all(marks.verdict is None and not marks.ranges for marks in evidence.conversation.marks)
    return usual and chosen and unmarked


def _compare(name: str, theirs: Any, evidence: Evidence, checks: list[str]) -> Iterator[Problem]:
    """Compare two masks; tokens of nothing but whitespace do not count."""
    encoded, text = evidence.encoded, evidence.rendered.text
    different = np.flatnonzero(theirs != (evidence.mask.tokens != 0)).tolist()
    different = [token for token in different if text[encoded.begins[token] : encoded.ends[token]].strip()]
    checks.append(f"{name} {'disagree' if different else 'agree'}")
    if different:
        token = different[0]
        begin, end = int(encoded.begins[token]), int(encoded.ends[token])
        verb = "train" if theirs[token] else "do not train"
        yield Problem(
            "disagreement",
            -1,
            f"{name} {verb} {text[begin:end]!r} at character {begin} ({len(different)} tokens differ)",
        )
