"""The special tokens of fill-in-the-middle: what known families call them, and their ids in a vocabulary."""

from collections.abc import Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.objectives.control_tokens import look_up, refuse_shared

FAMILIES: dict[str, tuple[str, str, str, str]] = {
    "StarCoder": ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"),
    "SantaCoder": ("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"),
    "Qwen": ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    "DeepSeek": ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>", "<｜▁pad▁｜>"),
    "CodeLlama": ("▁<PRE>", "▁<MID>", "▁<SUF>", "<pad>"),
    "Mistral": ("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "<pad>"),
    "Falcon": (">>PREFIX<<", ">>MIDDLE<<", ">>SUFFIX<<", "<pad>"),
}
"""Prefix, middle, suffix and pad, by who made them; Qwen's are also those of OLMo 2, CodeGemma and SmolLM 2.

DeepSeek writes its hole between prefix and suffix, where the others write the suffix token, and its end before the
middle: the same order.
"""


ROLES = ("the prefix token", "the middle token", "the suffix token", "the padding token")


def infill_ids(tokens: Sequence[int | str] | None, tokenizer: Any, *, pad: bool, where: str) -> tuple[int, ...]:
    """Ids of prefix, middle, suffix and, with `pad`, the filling.

    Args:
        tokens: Ids or names, in that order; None: those of the first known family that the tokenizer has all of.
        tokenizer: The `Tokenizer` that knows the names.
        pad: A fourth one is due. Where `tokens` has none, or the family's is not in the vocabulary, it is the
            tokenizer's padding token.
        where: Whose setting it is, for errors.

    Raises:
        ConfigError: The vocabulary lacks one, or two are the same.
    """
    known: dict[str, int] = tokenizer.special_tokens
    names: tuple[int | str, ...] = tuple(tokens) if tokens is not None else _family(known, tokenizer.name, where)
    due = names[:3]
    if pad:
        filling = names[3] if len(names) == 4 and (tokens is not None or names[3] in known) else tokenizer.pad_id
        if filling is None:
            raise ConfigError(
                f"{where}: character splits fill a document up with a padding token, and {tokenizer.name} has none; "
                f"name a fourth of tokens=, or add one: {_addition(tokenizer.name, names[3:] or ['<pad>'])}"
            )
        due = (*due, filling)
    ids = tuple(_id_of(token, role, tokenizer, where) for role, token in zip(ROLES, due, strict=False))
    refuse_same(ids, where)
    return ids


def refuse_same(tokens: Sequence[int | str], where: str) -> None:
    """Raise a ConfigError where two of the ids among `tokens` are one."""
    ids = [(role, token) for role, token in zip(ROLES, tokens, strict=False) if isinstance(token, int)]
    try:
        refuse_shared(ids)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _family(known: dict[str, int], name: str, where: str) -> tuple[str, str, str, str]:
    found = next((family for family in FAMILIES.values() if all(entry in known for entry in family[:3])), None)
    if found is None:
        first = next(iter(FAMILIES.values()))
        raise ConfigError(
            f"{where}: {name} has no tokens for infilling of any known family ({', '.join(FAMILIES)}); say which to "
            f"use, tokens=(prefix, middle, suffix), or add some: {_addition(name, first)}"
        )
    return found


def _addition(name: str, tokens: Sequence[int | str]) -> str:
    """The command that adds control tokens."""
    options = " ".join(f"--token {token!r}" for token in tokens)
    return f"penstock tokenizer add {name} {options} --output DIR, and tokenizer=DIR here"


def _id_of(token: int | str, role: str, tokenizer: Any, where: str) -> int:
    if isinstance(token, str):
        cure = f"name another in tokens=, or add it: {_addition(tokenizer.name, [token])}"
        return look_up(tokenizer, token, role=role, where=where, cure=cure)
    if token >= tokenizer.vocab_size:
        raise ConfigError(f"{where}: {role} is {token}; {tokenizer.name} has ids below {tokenizer.vocab_size}")
    return token
