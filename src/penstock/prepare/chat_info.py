"""What a preparation of chats says of itself: to people before it begins, and in the dataset for those who serve it."""

from collections.abc import Iterator
from typing import Any

from penstock.chat import ChatEncoder, describe_layout, detect_family
from penstock.errors import RecordError
from penstock.prepare.chat_settings import CROSS_CHECK, ChatSettings, day_of
from penstock.prepare.chat_summary import ChatSummary
from penstock.shards import ChatInfo


def describe_chat(encoder: ChatEncoder, chat: ChatSettings, summary: ChatSummary) -> ChatInfo:
    """What a dataset ships: template, settings, and what ends a generation.

    That are the control tokens which trained turns ended with, those that the template's family is known to stop at,
    and EOS.
    """
    tokenizer, template = encoder.tokenizer, encoder.template
    control = tokenizer.special_tokens
    family = detect_family(template.source)
    learned = [text for text, counts in summary.terminators.items() if counts.trained]
    ids = {control[text] for text in (*learned, *(family.stop if family else ())) if text in control}
    if tokenizer.eos_id is not None:
        ids.add(tokenizer.eos_id)
    return ChatInfo(
        template=template.source,
        template_name=template.name,
        template_fingerprint=template.fingerprint,
        variables=dict(template.variables),
        date=day_of(template),
        stop_ids=tuple(sorted(ids)),
        stop_texts=tuple(learned),
        settings=chat.describe(),
    )


def chat_notices(encoder: ChatEncoder, chat: ChatSettings, first: tuple[dict[str, Any], str] | None) -> Iterator[str]:
    """Each setting as it is in force, a line a group; role boundaries as ids; and what the first record was taken for.

    Args:
        encoder: With its template.
        chat: The settings.
        first: The first record and its origin, if there is one.
    """
    template = encoder.template
    family = detect_family(template.source)
    known = f", of the family {family.name}" if family else ""
    day = f", which writes the day {day_of(template)}" if template.now else ""
    yield f"chat template: {template.name}{known}{day}"
    if first is not None:
        try:
            yield f"first record: {describe_layout(first[0], chat.layout, first[1])}"
        except RecordError as error:
            yield f"first record: {error}"
    for boundary in encoder.boundaries:
        yield f"masks are held against the role boundary {boundary}"
    for group, settings in chat.describe().items():
        if group == CROSS_CHECK:
            continue
        shown = [f"{name} {_shown(value)}" for name, value in settings.items() if value not in (None, {})]
        yield f"{group}: {', '.join(shown)}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)
