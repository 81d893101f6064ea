"""Settings that decide what of a conversation is trained, under the names that axolotl uses."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, final, get_args

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping
from penstock.core.suggestions import refuse_unknown

Terminators = Literal["turn", "all", "last", "none"]
_TERMINATORS = ("turn", "all", "last", "none")
ControlTextPolicy = Literal["error", "as_text", "as_control_tokens"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSettings:
    """Which parts of a conversation are trained. A record's training keys (`train`, `weight`,
    ranges) override them.
    """

    roles_to_train: tuple[str, ...] = ("assistant",)
    """Roles to train. Empty: only messages with a training key of their own."""
    train_on_inputs: bool = False
    """Train everything, including the template's text."""
    train_on_eos: Terminators = "turn"
    """Train the terminators of trained turns (turn), of all turns (all), of the last trained turn
    (last), of none.
    """
    train_on_eot: Terminators | None = None
    """The same for terminators other than the tokenizer's EOS, such as <|im_end|>; None: as
    `train_on_eos`.
    """
    mask_history: bool = False
    """Train only the last of the trained turns."""
    train_on_reasoning: bool = True
    """Train the reasoning (thinking) of trained turns, with the tags around it."""
    trained_control_text: ControlTextPolicy = "error"
    """If a message of a trained role has control text of the tokenizer in its own text, such as a
    typed <tool_call>: refuse the conversation (error); encode it as text (as_text); or encode it as
    control tokens, with the ids of transformers (as_control_tokens). In messages of system, user
    and tool, control text always stays text.
    """
    allow_forged: bool = False
    """Let control text in messages of every role become control tokens, as other tools do."""
    on_missing_terminator: Literal["error", "allow", "append"] = "error"
    """If the template ends a trained turn without a terminator, so that the model would not learn
    to stop: refuse the conversation; allow it; or append EOS to the last turn and report the
    others.
    """
    on_rewrite: Literal["report", "error", "split"] = "report"
    """If the template writes a turn, or the text before it, differently from when it prompts for
    that turn (it strips earlier thinking), so that training does not match prompting: report it;
    refuse the conversation; or make one document of each reply, after the text that prompts for it.
    """

    on_merged_prompt: Literal["report", "error", "split"] = "report"
    """If the tokenizer merges the end of a prompt with the beginning of the reply, so that the
    prompt's ids are not those that the document has: report it; refuse the conversation; or split
    the token there.
    """

    def __post_init__(self) -> None:
        for name in ("train_on_eos", "train_on_eot"):
            value = getattr(self, name)
            if value not in _TERMINATORS and not (value is None and name == "train_on_eot"):
                raise ConfigError(f"{name} must be one of {', '.join(_TERMINATORS)}, got {value!r}")
        for name, choices in (
            ("on_missing_terminator", ("error", "allow", "append")),
            ("on_rewrite", ("report", "error", "split")),
            ("on_merged_prompt", ("report", "error", "split")),
            ("trained_control_text", get_args(ControlTextPolicy)),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        for name in ("train_on_inputs", "mask_history", "train_on_reasoning", "allow_forged"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.allow_forged and self.trained_control_text == "as_text":
            raise ConfigError(
                "trained_control_text is as_text, but allow_forged turns control text in all "
                "messages into control tokens; remove one of the two"
            )
        roles: Any = self.roles_to_train
        if not isinstance(roles, list | tuple | set | frozenset) or not all(
            isinstance(role, str) for role in roles
        ):
            raise ConfigError(f"roles_to_train must be a list of roles, got {roles!r}")
        object.__setattr__(self, "roles_to_train", tuple(roles))

    @classmethod
    def of(cls, given: Mapping[str, Any], hint: str = "") -> "MaskSettings":
        """Settings from a mapping.

        Args:
            given: Name → value.
            hint: Appended to the error about an unknown name that resembles no setting.

        Raises:
            ConfigError: A name is unknown, or a value is out of range.
        """
        known = [field.name for field in fields(cls)]
        refuse_unknown(given, known, "a setting of the mask", f"known: {', '.join(known)}{hint}")
        return cls(**given)

    def describe(self) -> JsonMapping:
        """Each setting with its effective value, for a log."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.on_merged_prompt == "report":
            del settings["on_merged_prompt"]  # so that datasets without it keep their fingerprint
        return settings | {"train_on_eot": self.train_on_eot or self.train_on_eos}
