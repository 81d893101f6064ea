"""What of a conversation is trained: the settings, under the names that users of axolotl know."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, final, get_args

from penstock.errors import ConfigError

Terminators = Literal["turn", "all", "last", "none"]
_TERMINATORS = ("turn", "all", "last", "none")
ControlTextPolicy = Literal["error", "as_text", "as_control_tokens"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What is trained of a conversation. What a record says of a message (`train`, `weight`, ranges) goes before it."""

    roles_to_train: tuple[str, ...] = ("assistant",)
    """Roles whose words are trained. Empty: only messages that say so themselves."""
    train_on_inputs: bool = False
    """Train everything, the template's text included."""
    train_on_eos: Terminators = "turn"
    """Train the terminator of trained turns (turn), of all turns (all), of the last trained turn (last), of none."""
    train_on_eot: Terminators | None = None
    """The same for terminators other than the tokenizer's EOS, such as <|im_end|>; None: as `train_on_eos`."""
    mask_history: bool = False
    """Train the last trained turn only."""
    train_on_reasoning: bool = True
    """Train the reasoning (thinking) of trained turns, with the tags around it."""
    trained_control_text: ControlTextPolicy = "error"
    """When a message of a trained role holds control text of the tokenizer in its own words, such as a <tool_call> that
    was typed: refuse the conversation (error); encode it as text (as_text); or encode it as control tokens, with the
    ids that transformers gives (as_control_tokens). Messages of system, user and tool always stay text."""
    allow_forged: bool = False
    """Let control text in messages of every role become control tokens, as other tools do."""
    on_missing_terminator: Literal["error", "allow", "append"] = "error"
    """When the template ends a trained turn without a terminator, so that the model would never learn to stop: refuse;
    accept; or append EOS to the last turn, and tell of the others."""
    on_rewrite: Literal["report", "error", "split"] = "report"
    """When the template writes a turn, or what is before it, otherwise than when it prompts for that turn (it strips
    earlier thinking), so that what is trained is not what will be prompted: report it; refuse; or make one document of
    each reply, after the text that prompts for it."""

    def __post_init__(self) -> None:
        for name in ("train_on_eos", "train_on_eot"):
            value = getattr(self, name)
            if value not in _TERMINATORS and not (value is None and name == "train_on_eot"):
                raise ConfigError(f"{name} must be one of {', '.join(_TERMINATORS)}, got {value!r}")
        for name, due in (
            ("on_missing_terminator", ("error", "allow", "append")),
            ("on_rewrite", ("report", "error", "split")),
            ("trained_control_text", get_args(ControlTextPolicy)),
        ):
            if getattr(self, name) not in due:
                raise ConfigError(f"{name} must be one of {', '.join(due)}, got {getattr(self, name)!r}")
        for name in ("train_on_inputs", "mask_history", "train_on_reasoning", "allow_forged"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.allow_forged and self.trained_control_text == "as_text":
            raise ConfigError(
                "trained_control_text is as_text, but allow_forged makes control tokens of all messages' control text; "
                "leave one of the two out"
            )
        roles: Any = self.roles_to_train
        if not isinstance(roles, list | tuple | set | frozenset) or not all(isinstance(role, str) for role in roles):
            raise ConfigError(f"roles_to_train must be a list of roles, got {roles!r}")
        object.__setattr__(self, "roles_to_train", tuple(roles))

    @classmethod
    def of(cls, given: Mapping[str, Any], hint: str = "") -> "Knobs":
        """Settings by their names.

        Args:
            given: Name → value.
            hint: What more to say of a name that is none, where none is close to it.

        Raises:
            ConfigError: A name is no setting, or a value is out of range.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                cure = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}{hint}"
                raise ConfigError(f"{name!r} is no setting of what is trained; {cure}")
        return cls(**given)

    def describe(self) -> Mapping[str, Any]:
        """Each setting as it is in force, for a log."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return settings | {"train_on_eot": self.train_on_eot or self.train_on_eos}
