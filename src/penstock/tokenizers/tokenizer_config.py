"""Added entries as `tokenizer_config.json` lists them, read as transformers reads the two files.

The flags in `added_tokens_decoder` replace those in `tokenizer.json`, and entries that only the
configuration lists are added, numbered after all others, whatever number they are listed with. A
listed number that this would not give is an error here, since the model was trained with one of the
two.
"""

import json
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import TokenizerError
from penstock.core.json_values import JsonObject

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def with_configured_entries(
    added: list[JsonObject], vocabulary: Mapping[str, int], config: bytes | None
) -> list[JsonObject]:
    """The `added_tokens` of a `tokenizer.json` with what the configuration says of them.

    Args:
        added: The entries in `tokenizer.json`.
        vocabulary: Text → id of the entries of its model.
        config: The content of `tokenizer_config.json`, or None.

    Raises:
        TokenizerError: The configuration lists an entry under a number that it cannot get.
    """
    entries = {entry["content"]: dict(entry) for entry in added}
    for token_id, listed in _listed(json.loads(config) if config is not None else {}):
        text = listed["content"]
        flags = {name: bool(listed[name]) for name in _FLAGS if name in listed}
        if text in entries:
            entries[text].update(flags)
            continue
        number = vocabulary.get(text, _next(entries, vocabulary))
        if token_id not in (None, number):
            raise TokenizerError(
                f"tokenizer_config.json lists {text!r} as {token_id}, and tokenizer.json does "
                f"not have it: it would become {number}; add it to the added_tokens of "
                "tokenizer.json under the id that the model knows"
            )
        entries[text] = {
            "id": number,
            "content": text,
            **dict.fromkeys(_FLAGS, False),
            "special": True,
            **flags,
        }
    return list(entries.values())


def _listed(config: JsonObject) -> list[tuple[int | None, JsonObject]]:
    """(its number, if one is given; the entry and its flags), in the order in which transformers
    adds them.
    """
    decoder = config.get("added_tokens_decoder") or {}
    found: list[tuple[int | None, Any]] = [
        (int(number), decoder[number]) for number in sorted(decoder, key=int)
    ]
    named = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    known = {_text(entry) for _, entry in found}
    more = named.values() if isinstance(named, dict) else named
    found += [(None, {"content": _text(entry)}) for entry in more if _text(entry) not in known]
    return [
        (number, entry if isinstance(entry, dict) else {"content": entry})
        for number, entry in found
    ]


def _text(entry: object) -> str:
    return str(entry["content"] if isinstance(entry, dict) else entry)


def _next(entries: dict[str, JsonObject], vocabulary: Mapping[str, int]) -> int:
    """The number that the tokenizers package gives to a new entry."""
    return max([len(vocabulary), *(int(entry["id"]) + 1 for entry in entries.values())])
