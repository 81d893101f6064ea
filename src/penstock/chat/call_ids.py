"""Ids of tool calls, for templates that insist on them: nine letters and digits, the same for the same conversation.

Mistral's templates raise on calls without an id and on ids of any other form, and few published tool sets have such.
An id is a function of its place and of what is called, so it looks as varied to the model as those of real traffic, and
preparing again gives the same bytes.
"""

import hashlib
from collections import deque
from typing import Any

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
LENGTH = 9


def shorten_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with an id of nine characters for each call, and the same one for its result.

    A result is matched by the id it had; one without takes the first call that has no result yet. A result that
    answers no call stays as it is, which the template may refuse.
    """
    waiting: deque[tuple[Any, str]] = deque()  # the old id of each call without a result, and its new one
    shortened = []
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            calls = []
            for place, call in enumerate(message["tool_calls"]):
                new = _short_id(index, place, call["function"])
                waiting.append((call.get("id"), new))
                calls.append({**call, "id": new})
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            answered = _answered(waiting, message.get("tool_call_id"))
            if answered is not None:
                waiting.remove(answered)
                message = {**message, "tool_call_id": answered[1]}
        shortened.append(message)
    return shortened


def _answered(waiting: deque[tuple[Any, str]], old: Any) -> tuple[Any, str] | None:
    """The call that a result with this id answers."""
    return next((pair for pair in waiting if old is None or pair[0] == old), None)


def _short_id(message: int, place: int, function: dict[str, Any]) -> str:
    digest = hashlib.blake2b(repr((message, place, function)).encode(), digest_size=8).digest()
    number, characters = int.from_bytes(digest, "little"), []
    for _ in range(LENGTH):
        number, digit = divmod(number, len(_DIGITS))
        characters.append(_DIGITS[digit])
    return "".join(characters)
