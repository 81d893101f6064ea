"""Code of the user's that answers a model: tools, a user, a game; and judges it.

    def environment(messages, reply, last):
        if reply.get("tool_calls") and not last:
            return [{"role": "tool", "content": run(reply)}]      what the model gets to see next
        return float("42" in reply["content"])                    the trajectory is over, with its reward

`([messages], reward)` gives a turn a reward of its own; the number at the end is then that of the
last turn. With parameters of these names it is also given: `record`, that of the prompt; `state`, a
dict of this trajectory alone; `finish_reason` of the reply; `last`, whether there is no room for
another turn, so that it must judge now; `room`, how many tokens its messages and the next reply may
have. Where messages leave no room for a reply it is asked again, with `last`.
"""  # noqa: E501

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.models.own_code import check_signature, load_own_code

_ALSO = ("record", "state", "finish_reason", "last", "room")
"""What it is given if it has parameters of these names."""


@final
@dataclass(frozen=True, slots=True)
class Answered:
    """What an environment made of a reply."""

    messages: tuple[JsonObject, ...] = ()
    """What comes next; empty: the trajectory is over."""
    reward: float | None = None
    """Of the trajectory, or of the turn where messages follow."""


@final
class Environment:
    """Calls the user's function.

    Args:
        given: The function, or its name (`module:function`, `path/to/file.py:function`).

    Raises:
        ConfigError: There is none, or it does not take (messages, reply).
    """

    def __init__(self, given: Callable[..., Any] | str) -> None:
        self._function = load_own_code(given, "environment")
        try:
            known = inspect.signature(self._function).parameters
        except (TypeError, ValueError):
            known = {}  # type: ignore[assignment]
        takes_all = any(one.kind == one.VAR_KEYWORD for one in known.values())
        self._also = [name for name in _ALSO if name in known or takes_all]
        asked = partial(self._function, **dict.fromkeys(self._also))
        check_signature(asked, "environment", ("messages", "reply"))

    def answer(
        self,
        messages: Sequence[JsonMapping],
        *,
        record: JsonMapping,
        state: dict[str, Any],
        finish_reason: str,
        last: bool,
        room: int,
    ) -> Answered:
        """What it makes of the last message.

        Raises:
            ConfigError: It gave something else than messages or a finite number; or messages where
                there is no room for a turn.
        """
        also = {
            "record": record,
            "state": state,
            "finish_reason": finish_reason,
            "last": last,
            "room": room,
        }
        chosen = {name: also[name] for name in self._also}
        # Copies: what it takes out of a call would be missing in the next prompt.
        told = copy.deepcopy([dict(one) for one in messages])
        found = self._function(told, copy.deepcopy(told[-1]), **chosen)
        answered = _answered(found)
        if last and answered.messages:
            raise ConfigError(
                "environment: gave messages, but there is no room for another turn (max_turns, or "
                "the context is full); let it take the parameter `last`, and give a reward then"
            )
        return answered


def _answered(found: object) -> Answered:
    if (reward := finite_number(found)) is not None:
        return Answered(reward=reward)
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list):
        if (reward := finite_number(found[1])) is None:
            raise ConfigError(
                f"environment: gave the reward {found[1]!r:.60}; expected a finite number"
            )
        return Answered(_messages(found[0]), reward)
    if isinstance(found, list):
        return Answered(_messages(found))
    raise ConfigError(
        f"environment: gave {found!r:.60}; expected a list of messages that come next, a finite "
        "number: the reward of a trajectory that is over, or both as a tuple"
    )


def _messages(found: Sequence[object]) -> tuple[JsonObject, ...]:
    messages = []
    for one in found:
        if not isinstance(one, Mapping) or "role" not in one:
            raise ConfigError(
                f"environment: gave the message {one!r:.60}; expected role and content"
            )
        messages.append(dict(one))
    if not messages:
        raise ConfigError("environment: gave no message; give a reward where it is over")
    return tuple(messages)


def finite_number(value: object) -> float | None:
    """A reward as a number; None: it is none. True is 1, and numbers of NumPy and tensors of one
    element are read, too.
    """
    if not isinstance(value, int | float) and math.prod(getattr(value, "shape", (0,))) == 1:
        value = getattr(value, "item", lambda: None)()
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
