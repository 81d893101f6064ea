"""Ids of the control tokens that objectives insert: by name, from a tokenizer's spare tokens, or by
infilling family.

Control ids never come from text: penstock's encoders do not make them, whatever a text spells. So a
sentinel's id is never content, unless a document was written with it on purpose.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.core.errors import ConfigError
from penstock.plan.objectives.objective import Facts
from penstock.tokenizers import Tokenizer

FAMILIES = (
    "sentinel",
    "extra_id",
    "reserved",
    "unused",
    "control",
    "special",
    "placeholder",
    "dummy",
)
"""Words in the names of spare tokens, next to one number, best first: T5's `<extra_id_0>`, OLMo's
`<|extra_id_0|>`, Llama 3's `<|reserved_special_token_0|>`, Gemma's `<unused0>`, Mistral's
`[control_8]`, tekken's `<SPECIAL_20>`, Phi's `<|placeholder1|>` and `<|dummy_0|>`.
"""
INFILL_FAMILIES: dict[str, tuple[str, str, str, str]] = {
    "StarCoder": ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"),
    "SantaCoder": ("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"),
    "Qwen": ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    "DeepSeek": ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>", "<｜▁pad▁｜>"),
    "CodeLlama": ("▁<PRE>", "▁<MID>", "▁<SUF>", "<pad>"),
    "Mistral": ("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "<pad>"),
    "Falcon": (">>PREFIX<<", ">>MIDDLE<<", ">>SUFFIX<<", "<pad>"),
}
"""Prefix, middle, suffix and pad, by who made them; Qwen's are also those of OLMo 2, CodeGemma and
SmolLM 2.

DeepSeek writes its hole between prefix and suffix, where the others write the suffix token, and its
end before the middle: the same order.
"""
ROLES = ("the prefix token", "the middle token", "the suffix token", "the padding token")


def spare_ids(controls: Mapping[str, int], *, taken: Collection[int]) -> list[int]:
    """Ids of the first family that a tokenizer has, by their number, without those `taken`; empty
    if it has none.
    """
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


def look_up(tokenizer: Tokenizer, name: str, *, role: str, where: str, cure: str) -> int:
    """The id of a control entry.

    Args:
        tokenizer: A `penstock.tokenizers.Tokenizer`.
        name: Its text, such as "[NLU]".
        role: What it is for, such as "the mode token of task 'R'".
        where: The source that has the objective.
        cure: How to fix it; ends the message.

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
    shown = [
        names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
        for names in families.values()
    ]
    return " ".join(shown[:24]) + (" …" if len(shown) > 24 else "") if shown else "none"


def refuse_shared(roles: Sequence[tuple[str, int]]) -> None:
    """Raise a ConfigError if two roles share an id, or an id is below 0 or above 2^31 - 1."""
    seen: dict[int, str] = {}
    for role, token_id in roles:
        if not 0 <= token_id < 1 << 31:
            raise ConfigError(f"{role} is {token_id}; expected a token id, 0 to 2^31 - 1")
        if token_id in seen:
            raise ConfigError(
                f"{role} and {seen[token_id]} are both id {token_id}; "
                "a model could not distinguish them: give each its own"
            )
        seen[token_id] = role


def tokenizer_of(facts: Facts, extended: str | None, where: str) -> Any:
    """The dataset's tokenizer, or the one named `extended`, which must spell the dataset's ids as
    that does.

    Raises:
        ConfigError: It does not, or the dataset stores no tokenizer.
    """
    if extended is None:
        return facts.tokenizer()
    from penstock.tokenizers.extension import difference
    from penstock.tokenizers.loading import load_tokenizer

    tokenizer, own = load_tokenizer(extended), facts.tokenizer()
    reason = difference(own, tokenizer)
    if reason is not None:
        raise ConfigError(
            f"{where}: tokenizer {extended} is no extension of the dataset's {own.name}: "
            f"{reason}; make one from it: penstock tokenizer add"
        )
    return tokenizer


def infill_ids(
    tokens: Sequence[int | str] | None, tokenizer: Tokenizer, *, pad: bool, where: str
) -> tuple[int, ...]:
    """Ids of prefix, middle, suffix and, with `pad`, the filling.

    Args:
        tokens: Ids or names, in that order; None: those of the first known family that the
            tokenizer has all of.
        tokenizer: The `Tokenizer` that knows the names.
        pad: Whether there must be a fourth one. Where `tokens` has none, or the family's is not in
            the vocabulary, it is the tokenizer's padding token.
        where: The source that has the setting, for errors.

    Raises:
        ConfigError: The vocabulary lacks one, or two are the same.
    """
    known: dict[str, int] = tokenizer.special_tokens
    names: tuple[int | str, ...] = (
        tuple(tokens) if tokens is not None else _family(known, tokenizer.name, where)
    )
    wanted = names[:3]
    if pad:
        filling = (
            names[3]
            if len(names) == 4 and (tokens is not None or names[3] in known)
            else tokenizer.pad_id
        )
        if filling is None:
            raise ConfigError(
                f"{where}: slots that a document does not need hold a padding token, and "
                f"{tokenizer.name} has none; name a fourth of tokens=, or add one: "
                f"{addition(tokenizer.name, names[3:] or ['<pad>'])}"
            )
        wanted = (*wanted, filling)
    ids = tuple(
        id_of(token, role, tokenizer, where) for role, token in zip(ROLES, wanted, strict=False)
    )
    refuse_same(ids, where)
    return ids


def refuse_same(tokens: Sequence[int | str], where: str) -> None:
    """Raise a ConfigError if two ids among `tokens` are equal."""
    ids = [
        (role, token) for role, token in zip(ROLES, tokens, strict=False) if isinstance(token, int)
    ]
    try:
        refuse_shared(ids)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _family(known: dict[str, int], name: str, where: str) -> tuple[str, str, str, str]:
    found = next(
        (
            family
            for family in INFILL_FAMILIES.values()
            if all(entry in known for entry in family[:3])
        ),
        None,
    )
    if found is None:
        first = next(iter(INFILL_FAMILIES.values()))
        raise ConfigError(
            f"{where}: {name} has no tokens for infilling of any known family "
            f"({', '.join(INFILL_FAMILIES)}); say which to use, tokens=(prefix, middle, "
            f"suffix), or add some: {addition(name, first)}"
        )
    return found


def addition(name: str, tokens: Sequence[int | str]) -> str:
    """The command that adds control tokens."""
    options = " ".join(f"--token {token!r}" for token in tokens)
    return f"penstock tokenizer add {name} {options} --output DIR, and tokenizer=DIR here"


def id_of(token: int | str, role: str, tokenizer: Tokenizer, where: str) -> int:
    """The id of a token for infilling, given as an id or as the name of a control entry.

    Raises:
        ConfigError: The tokenizer does not have it.
    """
    if isinstance(token, str):
        cure = f"name another, or add it: {addition(tokenizer.name, [token])}"
        return look_up(tokenizer, token, role=role, where=where, cure=cure)
    if token >= tokenizer.vocab_size:
        raise ConfigError(
            f"{where}: {role} is {token}; {tokenizer.name} has ids below {tokenizer.vocab_size}"
        )
    return token
