"""What a user says about the layout of conversations, with names that users of axolotl know."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from penstock.chat.marks import TRAINING_KEYS
from penstock.chat.roles import BUILT_IN, KNOWN_ROLES, source_roles
from penstock.errors import ConfigError

LAYOUTS = ("messages", "sharegpt", "alpaca", "prompt_completion", "preference", "oasst")
FIELDS = ("prompt", "completion", "instruction", "input", "output", "history", "chosen")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How the messages of one list are read."""

    role_key: str
    content_key: str
    roles: Mapping[str, str]
    """Name in the record → role."""

    mapping: Mapping[str, str]
    """Property as templates know it → its name in the record, `role` and `content` among them."""

    consumed: frozenset[str]
    """Names in the record that are mapped, stale beside a mapped one, or about training: not copied as they are."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSettings:
    """How records become conversations; the defaults read every layout that is known."""

    layout: str = "auto"
    """One of `messages`, `sharegpt`, `alpaca`, `prompt_completion`, `preference`, `oasst`; or `auto`: by its fields."""

    field_messages: str | None = None
    """The field with the list of messages. Once named, other fields that hold messages are not looked at."""

    field_system: str | None = None
    """The field with the system message; None: `system`. Once named, it beats a system message in the list."""

    field_tools: str | None = None
    """The field with the tools; None: `tools`, or `functions`."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """Our name → the record's, for layouts without messages: `{prompt: question, completion: answer}`. Naming an answer
    (`completion`, `output`, `chosen`) also says which layout it is, whatever else the record holds."""

    message_property_mappings: Mapping[str, str] = field(default_factory=dict)
    """A message's property as templates know it → its name in the record: `{role: from, content: value}`."""

    message_field_training: str | None = None
    """The message's flag that says whether to train it; None: `train`, `training` or `loss`."""

    message_field_training_detail: str | None = None
    """The message's list of character ranges; None: `train_detail`, `training_detail` or `train_ranges`."""

    roles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Role → its names in the records, added to those that the layout knows: `{assistant: [gpt, model]}`."""

    drop_system_message: bool = False
    """Leave system messages out."""

    split_thinking: bool = False
    """Move thinking between tags that opens an assistant's content (`<think>` and the like) to `thinking_key`."""

    thinking_key: str = "reasoning_content"
    """What the template calls thinking; gpt-oss templates call it `thinking`."""

    decode_arguments: bool = True
    """Tool call arguments that are the JSON text of an object become the object where the template fails on the text or
    would quote it once more; False: never."""

    call_ids: str = "keep"
    """`keep` the ids of tool calls, or make them `short`: nine characters, as Mistral's templates demand."""

    join_text_parts: bool = True
    """Contents made of text parts only become one text where the template fails on the list, or does not write its
    texts; False: never."""

    media: str = "error"
    """Images, audio and video, as parts or next to the messages: `error`, as they cannot be encoded as text; or `drop`
    them and their placeholders (`<image>`), which is counted."""

    oasst_paths: str = "best"
    """Of a tree: `best`, the path of best-ranked replies; or `all`, one conversation for each last reply."""

    _dialects: Mapping[str, Dialect] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.layout not in ("auto", *LAYOUTS):
            raise ConfigError(f'layout is "{self.layout}"; due auto or one of: {", ".join(LAYOUTS)}')
        if self.oasst_paths not in ("best", "all"):
            raise ConfigError(f'oasst_paths is "{self.oasst_paths}"; due best or all')
        if self.media not in ("error", "drop"):
            raise ConfigError(f'media is "{self.media}"; expected error or drop')
        if self.call_ids not in ("keep", "short"):
            raise ConfigError(f'call_ids is "{self.call_ids}"; due keep or short')
        for name in self.fields:
            if name not in FIELDS:
                raise ConfigError(f'fields: "{name}" is no field of a layout; due one of: {", ".join(FIELDS)}')
        configured = source_roles(self.roles)
        declared = {role: role for role in self.roles if role not in configured}
        keys = {"messages": ("role", "content"), "sharegpt": ("from", "value"), "oasst": ("role", "text")}
        dialects = {
            layout: self._dialect(
                {"role": role, "content": content, **self.message_property_mappings},
                {**BUILT_IN[layout], **declared, **configured},
            )
            for layout, (role, content) in keys.items()
        }
        dialects["own"] = self._dialect({"role": "role", "content": "content"}, {role: role for role in KNOWN_ROLES})
        object.__setattr__(self, "_dialects", dialects)

    def _dialect(self, mapping: dict[str, str], roles: dict[str, str]) -> Dialect:
        training = [name for name in (self.message_field_training, self.message_field_training_detail) if name]
        return Dialect(
            role_key=mapping["role"],
            content_key=mapping["content"],
            roles=roles,
            mapping=mapping,
            consumed=frozenset({*mapping, *mapping.values(), *training, *TRAINING_KEYS}),
        )

    def dialect(self, layout: str) -> Dialect:
        """How messages of `messages`, `sharegpt` or `oasst` are read; `own` are those that this room builds itself."""
        return self._dialects[layout]

    def name(self, field_name: str, *others: str) -> tuple[str, ...]:
        """The names under which the record may hold a field: the configured one alone, or ours and `others`."""
        configured = self.fields.get(field_name)
        return (configured,) if configured else (field_name, *others)
