"""Ids of the control tokens that an objective puts among a document's own: by name, or from a tokenizer's spare ones.

Control ids never come from text: penstock's encoders do not make them, whatever a text spells. So a sentinel is told
from content by its id, as long as no document was written with it on purpose.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.objectives.objective import Facts

FAMILIES = ("sentinel", "extra_id", "reserved", "unused", "control", "special", "placeholder", "dummy")
"""What names of spare tokens hold beside one number, best first: T5's `<extra_id_0>` and OLMo's `<|extra_id_0|>`, Llama
3's `<|reserved_special_token_0|>`, Gemma's `<unused0>`, Mistral's `[control_8]`, tekken's `<SPECIAL_20>`, Phi's
`<|placeholder1|>` and `<|dummy_0|>`."""


def spare_ids(controls: Mapping[str, int], *, taken: Collection[int]) -> list[int]:
    """Ids of the first family that a tokenizer has, by their number, without those `taken`; empty if it has none."""
    families: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for name, token_id in controls.items():
        numbers = re.findall(r"\d+", name)
        kinds = [place for place, word in enumerate(FAMILIES) if word in name.lower()]
        if len(numbers) == 1 and kinds and token_id not in taken:
            family = kinds[0], re.sub(r"\d+", "#", name)
            families.setdefault(family, []).append((int(numbers[0]), token_id))
    if not families:
        return []
    best = min(families, key=lambda family: (family[0], -len(families[family]), family[1]))
    return [token_id for _, token_id in sorted(families[best])]


def look_up(tokenizer: Any, name: str, *, role: str, where: str, cure: str) -> int:
    """The id of a control entry.

    Args:
        tokenizer: A `penstock.tokenizers.Tokenizer`.
        name: Its text, such as "[NLU]".
        role: What it is for, such as "the mode token of task 'R'".
        where: Whose objective it is.
        cure: What else may be done, ending the message.

    Raises:
        ConfigError: The tokenizer has no such control entry.
    """
    found = tokenizer.special_tokens.get(name)
    if found is None:
        raise ConfigError(
            f"{where}: {role} is {name!r}, which is no control entry of {tokenizer.name}; it has "
            f"{listed(tokenizer.special_tokens)}; {cure}"
        )
    return int(found)


def listed(controls: Mapping[str, int]) -> str:
    """The control entries in short: families of numbered names as one."""
    families: dict[str, list[str]] = {}
    for name in controls:
        families.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    shown = [names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})" for names in families.values()]
    return " ".join(shown[:24]) + (" …" if len(shown) > 24 else "") if shown else "none"


def refuse_shared(roles: Sequence[tuple[str, int]]) -> None:
    """Raise a ConfigError where two roles have one id, or an id is below 0 or above 2^31 - 1."""
    seen: dict[int, str] = {}
    for role, token_id in roles:
        if not 0 <= token_id < 1 << 31:
            raise ConfigError(f"{role} is {token_id}; due: a token id, 0 to 2^31 - 1")
        if token_id in seen:
            raise ConfigError(
                f"{role} and {seen[token_id]} are both id {token_id}; "
                "a model could not tell them apart: give each its own"
            )
        seen[token_id] = role


def tokenizer_of(facts: Facts, extended: str | None, where: str) -> Any:
    """The dataset's tokenizer, or the one named `extended`, which must spell the dataset's ids as that does.

    Raises:
        ConfigError: It does not, or the dataset's is not there.
    """
    if extended is None:
        return facts.tokenizer()
    from penstock.tokenizers import load_tokenizer
    from penstock.tokenizers.adding import difference

    tokenizer, own = load_tokenizer(extended), facts.tokenizer()
    reason = difference(own, tokenizer)
    if reason is not None:
        raise ConfigError(
            f"{where}: tokenizer {extended} is no extension of the dataset's {own.name}: {reason}; make one from it: "
            "penstock tokenizer add"
        )
    return tokenizer
