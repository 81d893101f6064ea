"""Describes a preparation of chats: for people before it begins, and in the dataset for serving."""

from collections.abc import Iterable, Iterator
from types import MappingProxyType

from penstock.chat import ChatEncoder, Template, detect_family
from penstock.chat.records.layouts import describe_layout
from penstock.core.errors import RecordError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.data.prepare.chat_settings import CROSS_CHECK, ChatSettings, day_of
from penstock.data.reports.chat_summary import ChatSummary
from penstock.data.shards import ChatInfo


def describe_chat(encoder: ChatEncoder, chat: ChatSettings, summary: ChatSummary) -> ChatInfo:
    """The chat information in a dataset: template, settings, and the tokens that end a generation.

    These are the control tokens at the end of trained turns, the known stop tokens of the
    template's family, and EOS.
    """
    tokenizer, template = encoder.tokenizer, encoder.template
    control = tokenizer.special_tokens
    family = detect_family(template.source)
    learned = [text for text, counts in summary.terminators.items() if counts.trained]
    ids = {
        control[text] for text in (*learned, *(family.stop if family else ())) if text in control
    }
    if tokenizer.eos_id is not None:
        ids.add(tokenizer.eos_id)
    return info_of(template, sorted(ids), stop_texts=learned, settings=chat.describe())


def info_of(
    template: Template,
    stop_ids: Iterable[int],
    *,
    stop_texts: Iterable[str] = (),
    settings: JsonMapping = MappingProxyType({}),
) -> ChatInfo:
    """The chat information of a template, with the tokens that end a generation, the texts of those
    that are trained, and the settings of a preparation.
    """
    return ChatInfo(
        template=template.source,
        template_name=template.name,
        template_fingerprint=template.fingerprint,
        variables=dict(template.variables),
        date=day_of(template),
        stop_ids=tuple(stop_ids),
        stop_texts=tuple(stop_texts),
        settings=dict(settings),
    )


def chat_notices(
    encoder: ChatEncoder, chat: ChatSettings, first: tuple[JsonObject, str] | None
) -> Iterator[str]:
    """The settings in effect, one line per group; role boundaries as ids; and the layout of the
    first record.

    Args:
        encoder: The encoder, with its template.
        chat: The settings.
        first: The first record and its origin, if there is one.
    """
    if first is not None:
        try:
            yield f"first record: {describe_layout(first[0], chat.layout, first[1])}"
        except RecordError as error:
            yield f"first record: {error}"
    for boundary in encoder.boundaries:
        yield f"masks are checked against the role boundary {boundary}"
    for group, settings in chat.describe().items():
        if group == CROSS_CHECK:
            continue
        shown = [
            f"{name} {_shown(value)}" for name, value in settings.items() if value not in (None, {})
        ]
        yield f"{group.replace('_', ' ')}: {', '.join(shown)}"


def describe_template(template: Template) -> str:
    """One phrase: the template's name, its family if it is a known one, and the date that it
    writes.
    """
    family = detect_family(template.source)
    facts = [f"family {family.name}"] if family else []
    facts += [f"writes the date {day_of(template)}"] if template.now else []
    noted = f" ({', '.join(facts)})" if facts else ""
    return f"chat template {template.name}{noted}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)
