"""Settings of `prepare` for chats: the template, how records are read, what is trained, what is
cleaned up.

All settings have different names, so that they can be given together: as keywords, in a file, on
the command line.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, final

from penstock.chat import (
    Boundary,
    ChatEncoder,
    LayoutSettings,
    MaskSettings,
    Template,
    load_template,
)
from penstock.chat.records.cleaning import CleaningSettings
from penstock.chat.records.layout_settings import resolve_roles
from penstock.chat.render.template import own_template
from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.core.suggestions import refuse_unknown
from penstock.media.images import ImageSettings
from penstock.media.processor import load_processor
from penstock.tokenizers import Tokenizer

OF_TEMPLATE = ("template", "date", "chat_template_kwargs", "role_boundaries", "processor")
"""Settings of the template itself."""

CROSS_CHECK = "cross-check"
"""Name of the role boundaries in the result of `describe`."""

GROUPS: dict[str, type] = {
    "layout": LayoutSettings,
    "mask_settings": MaskSettings,
    "cleaning": CleaningSettings,
    "images": ImageSettings,
}
"""The other settings, by the field of `ChatSettings` that holds them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Settings for records that are conversations."""

    template: Template | str | Path = "auto"
    """A .jinja file, a folder with a tokenizer, the text of a template, the name of a family that
    has one (chatml), or auto: the tokenizer's own.
    """

    chat_template_kwargs: JsonMapping = field(default_factory=dict)
    """Variables for the template, such as `enable_thinking`; those of a record take precedence."""

    date: str | None = None
    """The date for templates that write one, such as 2026-12-31; None: the day on which the
    preparation begins.
    """

    role_boundaries: Sequence[Boundary] = ()
    """Markers of turns for checking the masks, each with role, start, end, also as mappings; empty:
    those of the template's family.
    """

    processor: str | Path | None = None
    """A model's folder, or its name on the Hub, with a processor of transformers: conversations may
    then have images, and `template: auto` is the processor's. None: images are refused, or dropped
    (`media: drop`).
    """

    layout: LayoutSettings = field(default_factory=LayoutSettings)
    """How records become conversations."""

    mask_settings: MaskSettings = field(default_factory=MaskSettings)
    """What is trained."""

    cleaning: CleaningSettings = field(default_factory=CleaningSettings)
    """What is trimmed and dropped, and the maximum length of a conversation."""

    images: ImageSettings = field(default_factory=ImageSettings)
    """Which images are accepted, and how they are stored."""

    def __post_init__(self) -> None:
        given: Sequence[Any] = self.role_boundaries
        boundaries = tuple(
            one if isinstance(one, Boundary) else Boundary.from_mapping(one) for one in given
        )
        object.__setattr__(self, "role_boundaries", boundaries)
        if self.date is not None:
            try:
                datetime.strptime(self.date, "%Y-%m-%d")
            except (ValueError, TypeError):
                raise ConfigError(
                    f"date must be a day such as 2026-12-31, got {self.date!r}"
                ) from None
        # Role names after mapping; a name that no message can have is refused.
        roles = resolve_roles(self.mask_settings.roles_to_train, self.layout.roles)
        object.__setattr__(self, "mask_settings", replace(self.mask_settings, roles_to_train=roles))

    @property
    def keeps_answers(self) -> bool:
        """Whether all answers of a record are kept, as one document."""
        return self.layout.answers != "best"

    def merge(self, options: Mapping[str, Any]) -> "ChatSettings":
        """These settings, overridden by others by name: `{"mask_history": True, "roles": …}`.

        Raises:
            ConfigError: A name is unknown, or a value is out of range.
        """
        refuse_unknown(options, chat_names(), "a setting of chats")
        merged = {name: options[name] for name in OF_TEMPLATE if name in options}
        for group, kind in GROUPS.items():
            chosen = {name: options[name] for name in _names(kind) if name in options}
            merged[group] = replace(getattr(self, group), **chosen)
        return replace(self, **merged)

    def open(self, tokenizer: Tokenizer, day: str | None) -> ChatEncoder:
        """The encoder that these settings describe.

        Args:
            tokenizer: The tokenizer; the template `auto` is its own.
            day: The date that an earlier run of this preparation has fixed, if any.

        Raises:
            ConfigError: There is no template.
        """
        template = self.template
        processor = None if self.processor is None else load_processor(self.processor)
        if template == "auto" and processor is not None and isinstance(processor.template, str):
            template = replace(
                own_template(tokenizer, source=processor.template), name=f"of {processor.name}"
            )
        elif template == "auto":
            template = own_template(tokenizer)
        elif not isinstance(template, Template):
            template = load_template(template, tokenizer=tokenizer)
        template = replace(template, variables={**template.variables, **self.chat_template_kwargs})
        if template.now is None and "strftime_now" in template.source:
            now = datetime.fromisoformat(self.date or day or date.today().isoformat())
            template = replace(template, now=now)
        return ChatEncoder(
            tokenizer, template, self.mask_settings, self.role_boundaries, processor=processor
        )

    def describe(self) -> dict[str, JsonObject]:
        """Every setting in effect except the template, as plain JSON values."""
        layout = {name: getattr(self.layout, name) for name in _names(LayoutSettings)}
        described = {
            "layout": layout,
            "mask_settings": dict(self.mask_settings.describe()),
            "cleaning": asdict(self.cleaning),
        }
        if self.processor is not None:
            described["images"] = {"processor": str(self.processor), **self.images.describe()}
        if self.role_boundaries:
            described[CROSS_CHECK] = {
                "role_boundaries": [asdict(one) for one in self.role_boundaries]
            }
        plain: dict[str, JsonObject] = json.loads(json.dumps(described, default=dict))
        return plain


def chat_names() -> list[str]:
    """The names of all settings of chats."""
    return [*OF_TEMPLATE, *(name for kind in GROUPS.values() for name in _names(kind))]


def day_of(template: Template) -> str | None:
    """The date that a template writes; None: it writes none."""
    return template.now.date().isoformat() if template.now is not None else None


def _names(settings: type) -> list[str]:
    return [one.name for one in fields(settings) if one.init]
