"""Roles: what records call the speakers, and what chat templates call them.

Every layout knows the names that its own records use; anything else needs `roles: {target: [names]}`, because a guess
here would decide which words are trained. A target may be any name, so a template with roles of its own is served by
`roles: {critic: [critic]}`.
"""

from collections.abc import Iterable, Mapping, Sequence

from penstock.errors import ConfigError

KNOWN_ROLES = ("user", "assistant", "system", "tool", "developer")
"""The roles of the OpenAI layout, which chat templates know."""

CALL = "function_call"
"""Target of names whose text is a tool call as JSON: an assistant's message with `tool_calls`."""

_SAME = {role: role for role in KNOWN_ROLES}
_MESSAGES = {**_SAME, "function": "tool"}
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
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": CALL,
    "tool_call": CALL,
}
_OASST = {**_SAME, "prompter": "user"}

BUILT_IN: Mapping[str, Mapping[str, str]] = {"messages": _MESSAGES, "sharegpt": _SHAREGPT, "oasst": _OASST}
"""Name in the record → role, for each layout that has names of its own."""


def source_roles(roles: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Name in the record → target, from the configured `{target: [names]}`.

    Raises:
        ConfigError: a name has two targets, or a list is a plain string.
    """
    found: dict[str, str] = {}
    for target, names in roles.items():
        if isinstance(names, str):
            raise ConfigError(f"roles: {target} has {names!r}; due a list of names: {target}: [{names}]")
        for name in names:
            if found.setdefault(name, target) != target:
                raise ConfigError(f"roles: {name!r} is listed under {found[name]} and {target}; list it under one")
    return found


def resolve_roles(names: Iterable[str], roles: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Names as a user may write them in `roles_to_train` → the roles that messages have after mapping.

    A role stays itself, an alias (`gpt`, `model`, those of `roles`) becomes its role: `[gpt]` trains the assistant.

    Raises:
        ConfigError: a name is neither.
    """
    aliases = {
        name: "assistant" if role == CALL else role for table in BUILT_IN.values() for name, role in table.items()
    }
    aliases |= source_roles(roles)
    # A target is a role even where a record uses the same word for another speaker.
    aliases |= {role: role for role in (*KNOWN_ROLES, *roles)}
    resolved = []
    for name in names:
        if name not in aliases:
            known = ", ".join((*KNOWN_ROLES, *(role for role in roles if role not in KNOWN_ROLES)))
            raise ConfigError(f"roles_to_train: {name!r} is no known role; known: {known}; add it to roles")
        resolved.append(aliases[name])
    return tuple(dict.fromkeys(resolved))


def unknown_role(role: object, known: Mapping[str, str]) -> str:
    """What to say of a role that no mapping knows: the known ones, and the line of configuration that adds it."""
    targets = dict.fromkeys((*KNOWN_ROLES, *(target for target in known.values() if target != CALL)))
    guess = _SHAREGPT.get(str(role).lower()) or _OASST.get(str(role).lower()) or "assistant"
    guess = "assistant" if guess == CALL else guess
    return f'has role "{role}"; known: {", ".join(targets)}; add roles: {{{guess}: [{role}]}}'
