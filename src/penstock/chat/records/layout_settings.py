"""Settings for the layout of conversations, under the names that axolotl uses, and the names of
roles.

Each layout knows the role names of its own records. Other names need `roles: {target: [names]}`: a
guess could train the wrong messages. A target may be any name, so `roles: {critic: [critic]}`
serves a template with its own roles.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

from penstock.chat.records.conversation import TRAINING_KEYS
from penstock.core.errors import ConfigError
from penstock.core.suggestions import NEAR, closest

KNOWN_ROLES = ("user", "assistant", "system", "tool", "developer")
"""Roles of the OpenAI layout, which chat templates know."""

CALL = "function_call"
"""Target for messages that hold a tool call as JSON text; they become assistant messages with
`tool_calls`.
"""

_SAME = {role: role for role in KNOWN_ROLES}
_CALLS = {
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": CALL,
    "tool_call": CALL,
}
_MESSAGES = {**_SAME, "function": "tool", **_CALLS}
_SHAREGPT = {
    **_SAME,
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    **_CALLS,
}
_OASST = {**_SAME, "prompter": "user"}

_LIKELY = {
    **{
        name: "assistant" if target == CALL else target
        for name, target in {**_SHAREGPT, **_OASST}.items()
    },
    "ipython": "tool",
    "environment": "tool",
    "tool_result": "tool",
    "tool_results": "tool",
    "function_result": "tool",
    "ai": "assistant",
}
"""Name, in lower case, → role that it stands for in published data. Others could be anybody."""

BUILT_IN: Mapping[str, Mapping[str, str]] = {
    "messages": _MESSAGES,
    "sharegpt": _SHAREGPT,
    "oasst": _OASST,
}
"""Layout → {name in the record: role}, for layouts with their own names."""

LAYOUTS = (
    "messages",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "preference",
    "steps",
    "oasst",
    "segments",
    "tokens",
)
FIELDS = (
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "history",
    "chosen",
    "rejected",
    "responses",
    "scores",
    "ranks",
    "label",
)


def source_roles(roles: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Invert the setting `{target: [names]}` to name in the record → target.

    Raises:
        ConfigError: A name has two targets, or a string stands where a list is expected.
    """
    found: dict[str, str] = {}
    for target, names in roles.items():
        if isinstance(names, str):
            raise ConfigError(
                f"roles: {target} has {names!r}; expected a list of names: {target}: [{names}]"
            )
        for name in names:
            if found.setdefault(name, target) != target:
                raise ConfigError(
                    f"roles: {name!r} is listed under {found[name]} and {target}; list it under one"
                )
    return found


def resolve_roles(names: Iterable[str], roles: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Map the names in `roles_to_train` to the roles that messages have after mapping.

    A role stays as it is; an alias (`gpt`, `model`, those in `roles`) becomes its role: `[gpt]`
    trains the assistant.

    Raises:
        ConfigError: A name is neither a role nor an alias.
    """
    aliases = {
        name: "assistant" if role == CALL else role
        for table in BUILT_IN.values()
        for name, role in table.items()
    }
    aliases |= source_roles(roles)
    # A target is a role even if a record uses the same word for another speaker.
    aliases |= {role: role for role in (*KNOWN_ROLES, *roles)}
    resolved = []
    for name in names:
        if name not in aliases:
            known = ", ".join((*KNOWN_ROLES, *(role for role in roles if role not in KNOWN_ROLES)))
            raise ConfigError(
                f"roles_to_train: {name!r} is no known role; known: {known}; add it to roles"
            )
        resolved.append(aliases[name])
    return tuple(dict.fromkeys(resolved))


def unknown_role(role: object, known: Mapping[str, str]) -> str:
    """Error text for an unknown role: lists the known ones and the setting that adds it."""
    targets = dict.fromkeys(
        (*KNOWN_ROLES, *(target for target in known.values() if target != CALL))
    )
    likely = _LIKELY.get(str(role).lower().strip())
    cure = (
        f"say which it is, such as roles: {{user: [{role}]}}; roles: {{{role}: [{role}]}} keeps "
        "it for the template"
    )
    if likely is None and (meant := closest(str(role).lower().strip(), KNOWN_ROLES, NEAR)):
        cure = (
            f"did you mean {meant}? correct it, or set roles: {{{meant}: [{role}]}}; roles: "
            f"{{{role}: [{role}]}} keeps it for the template"
        )
    if likely is not None:
        cure = f"add roles: {{{likely}: [{role}]}}"
    return f'has role "{role}"; known: {", ".join(targets)}; {cure}'


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Field and role names of one list of messages."""

    role_key: str
    content_key: str
    roles: Mapping[str, str]
    """Name in the record → role."""
    mapping: Mapping[str, str]
    """Property as templates call it → its name in the record, including `role` and `content`."""
    consumed: frozenset[str]
    """Fields of the record that are not copied: mapped ones, those that a mapping replaces, and
    training keys.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSettings:
    """How records become conversations; the defaults read every known layout."""

    layout: str = "auto"
    """`messages`, `sharegpt`, `alpaca`, `prompt_completion`, `preference`, `steps`, `oasst`,
    `segments`, `tokens`; or `auto`: detect it by fields.
    """
    field_messages: str | None = None
    """Field with the list of messages. If set, no other field is searched for messages."""
    field_system: str | None = None
    """Field with the system message; None: `system`. If set, it replaces a system message in the
    list.
    """
    field_tools: str | None = None
    """Field with the tools; None: `tools` or `functions`."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Name in the layout → name in the record, for layouts without messages: `{prompt: question,
    completion: answer}`. A record with the field that is named for an answer (`completion`,
    `output`, `chosen`) has that layout, whatever else it holds; others are read by the fields that
    they have. An empty name, `{input: ""}`: records have no such field.
    """
    message_property_mappings: Mapping[str, str] = field(default_factory=dict)
    """Property of a message as templates call it → its name in the record: `{role: from, content:
    value}`.
    """
    message_field_training: str | None = None
    """Flag of a message that says whether it is trained; None: `train`, `training` or `loss`.
    Besides it, `weight` or `loss_weight` is the message's loss weight.
    """
    message_field_training_detail: str | None = None
    """List of character ranges of a message; None: `train_detail`, `training_detail` or
    `train_ranges`.
    """
    roles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Role → its names in the records, in addition to those of the layout: `{assistant: [gpt,
    model]}`.
    """
    drop_system_message: bool = False
    """Remove system messages."""
    split_thinking: bool = False
    """Move thinking between tags (`<think>` and the like) at the start of an assistant's content to
    `thinking_key`.
    """
    thinking_key: str = "reasoning_content"
    """Name of the thinking field in the template; gpt-oss templates use `thinking`."""
    decode_arguments: bool = True
    """Decode tool call arguments that are JSON text of an object, if the template fails on the text
    or would quote it again; False: never.
    """
    call_ids: Literal["keep", "short"] = "keep"
    """`keep` the ids of tool calls, or make them `short`: nine characters, as Mistral's templates
    require.
    """
    join_text_parts: bool = True
    """Join a content that has only text parts into one text, if the template fails on the list or
    does not write its texts; False: never.
    """
    media: Literal["error", "drop"] = "error"
    """Images, audio and video, as parts or next to the messages: `error`, since text encoding
    cannot represent them; or `drop`, which removes and counts them, with their placeholders
    (`<image>`).
    """
    oasst_paths: Literal["best", "all", "ranked"] = "best"
    """Conversations of a tree: `best`, the path of best-ranked replies; `all`, one for each last
    reply; or `ranked`, with answers tree or separate: a set of answers for each message with
    several ranked replies.
    """
    answers: Literal["best", "tree", "separate"] = "best"
    """Records with several answers (chosen and rejected, ranked, labelled, trees): `best` trains
    the best one alone; `tree` keeps all, for `training.preference`, and stores what they begin with
    once; `separate` keeps all, each by itself, for models that cannot process trees. With these, a
    conversation split by on_rewrite is one document.
    """
    shared_weights: Literal["sum", "once"] = "sum"
    """With answers tree: the weight of a target that several paths share is the `sum` over them, as
    if each were stored by itself, or counts `once`: the largest.
    """
    _dialects: Mapping[str, Dialect] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        if self.layout not in ("auto", *LAYOUTS):
            raise ConfigError(
                f'layout is "{self.layout}"; expected auto or one of: {", ".join(LAYOUTS)}'
            )
        if self.oasst_paths not in ("best", "all", "ranked"):
            raise ConfigError(f'oasst_paths is "{self.oasst_paths}"; expected best, all or ranked')
        if self.answers not in ("best", "tree", "separate"):
            raise ConfigError(f'answers is "{self.answers}"; expected best, tree or separate')
        if self.shared_weights not in ("sum", "once"):
            raise ConfigError(f'shared_weights is "{self.shared_weights}"; expected sum or once')
        if self.oasst_paths == "ranked" and self.answers == "best":
            raise ConfigError(
                "oasst_paths: ranked keeps several answers; set answers to tree or separate"
            )
        if self.media not in ("error", "drop"):
            raise ConfigError(f'media is "{self.media}"; expected error or drop')
        if self.call_ids not in ("keep", "short"):
            raise ConfigError(f'call_ids is "{self.call_ids}"; expected keep or short')
        for name in self.fields:
            if name not in FIELDS:
                raise ConfigError(
                    f'fields: "{name}" is no field of a layout; expected one of: '
                    f"{', '.join(FIELDS)}"
                )
        configured = source_roles(self.roles)
        declared = {role: role for role in self.roles if role not in configured}
        keys = {
            "messages": ("role", "content"),
            "sharegpt": ("from", "value"),
            "oasst": ("role", "text"),
        }
        dialects = {
            layout: self._dialect(
                {"role": role, "content": content, **self.message_property_mappings},
                {**BUILT_IN[layout], **declared, **configured},
            )
            for layout, (role, content) in keys.items()
        }
        dialects["own"] = self._dialect(
            {"role": "role", "content": "content"}, {role: role for role in KNOWN_ROLES}
        )
        object.__setattr__(self, "_dialects", dialects)

    def _dialect(self, mapping: dict[str, str], roles: dict[str, str]) -> Dialect:
        training = [
            name
            for name in (self.message_field_training, self.message_field_training_detail)
            if name
        ]
        return Dialect(
            role_key=mapping["role"],
            content_key=mapping["content"],
            roles=roles,
            mapping=mapping,
            consumed=frozenset({*mapping, *mapping.values(), *training, *TRAINING_KEYS}),
        )

    def dialect(self, layout: str) -> Dialect:
        """The dialect of `messages`, `sharegpt` or `oasst`; `own`: of messages that this package
        builds itself.
        """
        return self._dialects[layout]

    def name(self, field_name: str, *others: str) -> tuple[str, ...]:
        """Names under which a record may hold a field: the configured one, then `field_name` and
        `others`; none, if the configured one is empty.
        """
        configured = self.fields.get(field_name)
        if configured is None:
            return (field_name, *others)
        return (configured, field_name, *others) if configured else ()
