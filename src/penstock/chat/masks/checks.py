"""Checks of a conversation: its trained text against its messages, its prompts and other methods.

`certify` runs them all and returns the certificate. Nothing here decides what is trained. Costs a
few microseconds per turn, plus the renders for prompts.

**Prompts.** Each trained reply was compared with plain renders of the messages before it
(`turns.py`). Two things can differ. The template may write a reply differently once more messages
follow (it strips earlier thinking). The text before a reply may not be what the model gets as its
prompt (it ends in a newline after the results of tools only if more follows). Both are reported,
and `chat/drafts.py` makes a document without it. Every conversation is checked, because a
template may depend on anything.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from penstock.chat.masks.authors import check_control_text, find_typed
from penstock.chat.masks.certificate import Certificate, Kind, Problem
from penstock.chat.masks.evidence import Evidence
from penstock.chat.masks.left_out import (
    check_structure,
    check_words,
    find_dropped,
    says_something,
    unwritten_messages,
)
from penstock.chat.masks.masks import why_not
from penstock.chat.records.unread import cure_of
from penstock.chat.render.template import Rendered
from penstock.chat.render.turns import Turn, place_of
from penstock.core.arrays import Bool
from penstock.core.json_values import JsonMapping

_MARKER = re.compile(r"<\S+>|\[\S+\]")
"""Text that can only be meant for a control token."""


def certify(evidence: Evidence) -> Certificate:
    """Check a conversation."""
    dropped = tuple(find_dropped(evidence))
    checks: list[str] = []
    roles = [message["role"] for message in evidence.conversation.messages]
    problems = [
        *_check_turns(evidence),
        *check_words(evidence, dropped),
        *check_structure(evidence, dropped),
        *_check_foreign(evidence),
        *_check_prompts(evidence),
        *_check_escapes(evidence.rendered),
        *check_control_text(
            evidence.rendered, evidence.encoded, evidence.authors, roles, evidence.settings
        ),
        *_check_methods(evidence, checks),
        *_check_result_order(evidence),
        *_check_borders(evidence),
        *check_unread(evidence.unread),
    ]
    weights = evidence.mask.tokens
    if evidence.appended is None and not (weights[1:] != 0).any():
        reasons = [
            why_not(evidence.conversation, message, evidence.settings)
            for message in range(len(roles))
        ]
        why = "" if evidence.mask.trained else f": {'; '.join(dict.fromkeys(reasons))}"
        problems.append(Problem("nothing_trained", -1, f"no token is trained{why}"))
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
        unread=evidence.unread,
        typed=find_typed(evidence.rendered, evidence.encoded, evidence.authors),
    )


def _check_borders(evidence: Evidence) -> Iterator[Problem]:
    """Report replies whose prompt's ids are no beginning of the document's."""
    text, encoded = evidence.rendered.text, evidence.encoded
    for message in evidence.merged:
        begin = evidence.turns[message].begin
        token = max(int(np.searchsorted(encoded.begins, begin, "left")) - 1, 0)
        shown = text[encoded.begins[token] : encoded.ends[token]]
        yield Problem(
            "merged_prompt",
            message,
            f"the prompt for it ends within or before the token {shown!r}, so the ids that "
            "prompt the model are not those of the document; on_merged_prompt: split ends "
            "the token where the prompt ends",
        )


def check_unread(names: Sequence[str]) -> Iterator[Problem]:
    """Report fields that nothing reads and whose names mean something elsewhere."""
    for name in names:
        if (cure := cure_of(name)) is not None:
            yield Problem("unread", -1, f"nothing reads the field {name!r}; {cure}")


def _check_turns(evidence: Evidence) -> Iterator[Problem]:
    """Check that each trained message is written, and that its turn opens like its prompt, says
    something, and ends.
    """
    settings, messages = evidence.settings, evidence.conversation.messages
    unwritten = unwritten_messages(evidence)
    for message in evidence.mask.trained:
        if message in unwritten and (
            says_something(messages[message]) or messages[message]["role"] == "assistant"
        ):
            cure = (
                "; drop_system_message: true removes it"
                if messages[message]["role"] == "system"
                else ""
            )
            yield Problem(
                "not_written", message, f"the template writes nothing of this message{cure}"
            )
        turn = evidence.turns.get(message)
        if turn is None:
            continue
        if turn.header:
            yield Problem(
                "unsupplied_header",
                message,
                f"the template begins the turn with {turn.header!r}, which its generation "
                "prompt does not supply, so the model would learn to write it; use a "
                "template that prompts as it writes",
            )
        if turn.supplied != turn.opening and messages[message]["role"] == "assistant":
            text = (
                f"the generation prompt is {turn.opening!r}, but the turn begins with "
                f"{turn.supplied!r}"
            )
            yield Problem("opening_differs", message, text)
        if _is_empty(messages[message], turn, evidence.rendered.text):
            yield Problem(
                "empty_reply", message, "it has no text, so at most its terminator is trained"
            )
        wanted = settings.train_on_eos != "none" or (settings.train_on_eot or "none") != "none"
        # No generation ends with a system message, so it needs no terminator.
        ends = wanted and messages[message]["role"] not in ("system", "developer")
        if settings.on_missing_terminator != "allow" and ends and not settings.train_on_inputs:
            yield from _check_terminator(evidence, message)


def _is_empty(message: JsonMapping, turn: Turn, text: str) -> bool:
    """Whether a message has no text or calls, and the template writes none for it (for parts of
    other types).
    """
    spans = [(begin, min(end, turn.words_end)) for begin, end in turn.produced]
    return not says_something(message) and not any(text[begin:end].strip() for begin, end in spans)


def _check_terminator(evidence: Evidence, message: int) -> Iterator[Problem]:
    """Check that a trained turn ends with something that the model can learn to write.

    If EOS is appended, only the last turn gets it; the others are reported.
    """
    is_error = evidence.settings.on_missing_terminator == "error"
    kind: Kind = "missing_terminator" if is_error else "unterminated"
    if message not in evidence.mask.terminators:
        if evidence.appended is None or message != evidence.mask.trained[-1]:
            cure = (
                "on_missing_terminator: append or allow"
                if is_error
                else "EOS can only be appended to the last turn; mask_history trains only that one"
            )
            report = (
                "the template ends the turn without a terminator, so the model would not learn "
                f"to stop; {cure}"
            )
            yield Problem(kind, message, report)
        return
    begin, end = evidence.mask.terminators[message]
    text = evidence.rendered.text[begin:end]
    if _MARKER.fullmatch(text) and not _has_control(evidence, begin, end):
        yield Problem(
            kind,
            message,
            f"its terminator {text!r} is no control token of this tokenizer; use the template "
            "that belongs to it, or train the terminator as text with on_missing_terminator: "
            "allow",
        )


def _has_control(evidence: Evidence, begin: int, end: int) -> bool:
    """Whether a control token lies within some characters.

    Looks at their tokens alone: at all tokens for each turn, a long trace would pay for its square.
    """
    encoded = evidence.encoded
    first, last = (
        int(np.searchsorted(encoded.begins, begin, "left")),
        int(np.searchsorted(encoded.begins, end, "right")),
    )
    return bool(encoded.is_control[first:last][encoded.ends[first:last] <= end].any())


def _check_result_order(evidence: Evidence) -> Iterator[Problem]:
    """Report results in another order than their calls, where the text does not say which is
    which.
    """
    messages = evidence.conversation.messages
    if not any(len(message.get("tool_calls") or ()) > 1 for message in messages):
        return
    with_ids = {run[1] for run in evidence.rendered.runs if run[2] == "tool_call_id"}
    for number, message in enumerate(messages):
        order = {
            call.get("id"): place for place, call in enumerate(message.get("tool_calls") or ())
        }
        results = list(
            takewhile(lambda one: messages[one]["role"] == "tool", range(number + 1, len(messages)))
        )
        places = [order.get(messages[one].get("tool_call_id")) for one in results]
        known = [place for place in places if place is not None]
        if known != sorted(known) and not with_ids.issuperset(results):
            names = ", ".join(message["tool_calls"][place]["function"]["name"] for place in known)
            report = (
                f"its results come in another order than its calls ({names}), and the template "
                "writes no ids"
            )
            yield Problem("result_order", number, report)


def _check_foreign(evidence: Evidence) -> Iterator[Problem]:
    """Check that no text of an untrained message is trained, and that the text of each trained
    reply is in a turn.
    """
    if evidence.settings.train_on_inputs:
        return
    characters, trained = evidence.mask.characters, set(evidence.mask.trained)
    roles = [message["role"] for message in evidence.conversation.messages]
    for words in evidence.rendered.words:
        begin, end, message, field, _ = words
        if not field.startswith(("content", "reasoning_content")):
            continue
        place = place_of(words, evidence.turns)
        if message not in trained:
            ranged = bool(evidence.conversation.message_weights[message].ranges)
            if not ranged and characters[begin:end].any():
                shown = evidence.rendered.text[begin : min(end, begin + 40)]
                report = f"the template writes {shown!r} where message {place} is trained"
                yield Problem("foreign_text", message, report)
        elif roles[message] == "assistant" and (place is None or roles[place] != "assistant"):
            yield Problem(
                "untraced",
                message,
                "the template writes its text outside any turn that can be followed, either "
                "by the loop over the messages or by the prompts; use a template that writes "
                "each reply after its prompt",
            )


def _check_escapes(rendered: Rendered) -> Iterator[Problem]:
    if rendered.escaped:
        yield Problem(
            "escaped",
            -1,
            f"Jinja escapes quotes and brackets ({rendered.escaped} more characters), because "
            "the template adds text with + after |safe or |e; a ~ b instead of a + b does not",
        )


def _check_methods(evidence: Evidence, checks: list[str]) -> Iterator[Problem]:
    """Compare the mask with the template's `{% generation %}` tags and the role boundaries of its
    family.
    """
    if not _is_plain(evidence):
        return
    if evidence.mask.generated is not None:
        yield from _compare("generation tags", evidence.mask.generated, evidence, checks)
    if evidence.scanned is not None and not evidence.encoded.forged:
        yield from _compare(
            f"boundaries of {evidence.family}", evidence.scanned, evidence, checks, by_markers=True
        )


def _is_plain(evidence: Evidence) -> bool:
    """Whether the settings train what the other methods train: whole turns of assistants."""
    settings = evidence.settings
    usual = (
        settings.train_on_eos == "turn"
        and settings.train_on_eot in (None, "turn")
        and settings.train_on_reasoning
    )
    chosen = (
        settings.roles_to_train == ("assistant",)
        and not settings.train_on_inputs
        and not settings.mask_history
    )
    unmarked = all(
        weights.train is None and weights.weight is None and not weights.ranges
        for weights in evidence.conversation.message_weights
    )
    return usual and chosen and unmarked


def _compare(
    name: str, theirs: Any, evidence: Evidence, checks: list[str], *, by_markers: bool = False
) -> Iterator[Problem]:
    """Compare another mask with ours, apart from tokens of whitespace.

    Markers know only the header of what a prompt supplies; the rest, such as an empty block of
    thinking, is excepted.
    """
    encoded, text = evidence.encoded, evidence.rendered.text
    different = np.flatnonzero(theirs != (evidence.mask.tokens != 0)).tolist()
    different = [
        token for token in different if text[encoded.begins[token] : encoded.ends[token]].strip()
    ]
    excepted = ""
    if different and by_markers:
        supplied = _supplied_tokens(evidence)
        rest = [token for token in different if not (theirs[token] and supplied[token])]
        excepted = ", apart from what the prompt supplies" if len(rest) < len(different) else ""
        different = rest
    checks.append(f"{name} {'disagree' if different else 'agree'}{excepted}")
    if different:
        token = different[0]
        begin, end = int(encoded.begins[token]), int(encoded.ends[token])
        verb = "train" if theirs[token] else "do not train"
        report = (
            f"{name} {verb} {text[begin:end]!r} at character {begin} ({len(different)} tokens "
            "differ)"
        )
        yield Problem("disagreement", -1, report)


def _supplied_tokens(evidence: Evidence) -> Bool:
    """Tokens within what the prompt for a trained turn supplies, all of which the text has, bool
    [tokens].
    """
    begins, ends = evidence.encoded.begins, evidence.encoded.ends
    supplied = np.zeros(len(begins), np.bool_)
    for message in evidence.mask.trained:
        turn = evidence.turns.get(message)
        if turn is not None and turn.supplied == turn.opening:
            first = np.searchsorted(begins, turn.begin - len(turn.supplied), "left")
            last = np.searchsorted(begins, turn.begin, "right")
            supplied[first:last] |= ends[first:last] <= turn.begin
    return supplied


def _check_prompts(evidence: Evidence) -> Iterator[Problem]:
    """Report trained replies that the template writes or prompts differently when they come
    last.
    """
    for message in evidence.mask.trained:
        turn = evidence.turns.get(message)
        if turn is None or evidence.conversation.messages[message]["role"] != "assistant":
            continue
        cure = "on_rewrite: split trains each reply as it is prompted"
        if turn.rewritten:
            yield Problem(
                "rewritten",
                message,
                f"with this reply last, the template writes {turn.rewritten}; {cure}",
            )
        elif turn.difference:
            report = (
                f"when it prompts for this reply, the template writes {turn.difference} before "
                f"it; {cure}"
            )
            yield Problem("context_differs", message, report)
