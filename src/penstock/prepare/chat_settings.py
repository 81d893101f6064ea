"""What prepare is told about chats: the template, how records are read, what is trained, what is cleaned up.

All settings have different names, so that they can be given side by side: as keywords, in a file, on the command line.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, final

from penstock.chat import Boundary, ChatEncoder, Knobs, LayoutSettings, Template, load_template, own_template
from penstock.chat.cleaning import CleaningSettings
from penstock.chat.roles import resolve_roles
from penstock.errors import ConfigError
from penstock.tokenizers import Tokenizer

CHAT_PART_BYTES = 4 << 20
"""Raw bytes of a part, about: a conversation takes far more time a byte than a text."""

OF_TEMPLATE = ("template", "date", "chat_template_kwargs", "role_boundaries")
"""Settings of the template itself."""

CROSS_CHECK = "cross-check"
"""What `describe` names the role boundaries by."""

GROUPS: dict[str, type] = {"layout": LayoutSettings, "knobs": Knobs, "cleaning": CleaningSettings}
"""The other settings, by the field of `ChatSettings` that holds them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Settings that make records conversations."""

    template: Template | str | Path = "auto"
    """A .jinja file, a folder with a tokenizer, the text of a template, the name of a family that has one (chatml), or
    auto: the one that came with the tokenizer."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template, such as `enable_thinking`; those of a record go before them."""

    date: str | None = None
    """The day that a template writes which asks for it, as 2026-12-31; None: the day on which preparing begins."""

    role_boundaries: Sequence[Boundary] = ()
    """Markers of turns to hold the masks against, each with role, start, end; empty: those of the template's family.
    Also as mappings."""

    layout: LayoutSettings = field(default_factory=LayoutSettings)
    """How records become conversations."""

    knobs: Knobs = field(default_factory=Knobs)
    """What is trained."""

    cleaning: CleaningSettings = field(default_factory=CleaningSettings)
    """What is trimmed and dropped, and the longest conversation."""

    def __post_init__(self) -> None:
        given: Sequence[Any] = self.role_boundaries
        boundaries = tuple(one if isinstance(one, Boundary) else Boundary.from_mapping(one) for one in given)
        object.__setattr__(self, "role_boundaries", boundaries)
        if self.date is not None:
            try:
                datetime.strptime(self.date, "%Y-%m-%d")
            except (ValueError, TypeError):
                raise ConfigError(f"date must be a day such as 2026-12-31, got {self.date!r}") from None
        # As messages have them after mapping, and none that no message can have.
        roles = resolve_roles(self.knobs.roles_to_train, self.layout.roles)
        object.__setattr__(self, "knobs", replace(self.knobs, roles_to_train=roles))

    def merge(self, options: Mapping[str, Any]) -> "ChatSettings":
        """These settings with others over them, by their own names: `{"mask_history": True, "roles": …}`.

        Raises:
            ConfigError: A name is not known, or a value is out of range.
        """
        unknown = [name for name in options if name not in chat_names()]
        if unknown:
            close = difflib.get_close_matches(unknown[0], chat_names(), 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(chat_names())}"
            raise ConfigError(f"{unknown[0]!r} is no setting of chats; {hint}")
        merged = {name: options[name] for name in OF_TEMPLATE if name in options}
        for group, kind in GROUPS.items():
            chosen = {name: options[name] for name in _names(kind) if name in options}
            merged[group] = replace(getattr(self, group), **chosen)
        return replace(self, **merged)

    def open(self, tokenizer: Tokenizer, day: str | None) -> ChatEncoder:
        """The encoder that these settings describe.

        Args:
            tokenizer: Encodes; the template `auto` is the one that came with it.
            day: The day that an earlier run of this preparation fixed, if any.

        Raises:
            ConfigError: There is no template.
        """
        template = self.template
        if template == "auto":
            template = own_template(tokenizer)
        elif not isinstance(template, Template):
            template = load_template(template, tokenizer=tokenizer)
        template = replace(template, variables={**template.variables, **self.chat_template_kwargs})
        if template.now is None and "strftime_now" in template.source:
            now = datetime.fromisoformat(self.date or day or date.today().isoformat())
            template = replace(template, now=now)
        return ChatEncoder(tokenizer, template, self.knobs, self.role_boundaries)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Every setting as it is in force, apart from the template, as JSON can hold it."""
        layout = {name: getattr(self.layout, name) for name in _names(LayoutSettings)}
        described = {"layout": layout, "knobs": dict(self.knobs.describe()), "cleaning": asdict(self.cleaning)}
        if self.role_boundaries:
            described[CROSS_CHECK] = {"role_boundaries": [asdict(one) for one in self.role_boundaries]}
        plain: dict[str, dict[str, Any]] = json.loads(json.dumps(described, default=dict))
        return plain


def chat_names() -> list[str]:
    """The names of all settings of chats."""
    return [*OF_TEMPLATE, *_names(Knobs), *_names(CleaningSettings), *_names(LayoutSettings)]


def day_of(template: Template) -> str | None:
    """The day that a template writes, where it writes one."""
    return template.now.date().isoformat() if template.now is not None else None


def _names(settings: type) -> list[str]:
    return [one.name for one in fields(settings) if one.init]
