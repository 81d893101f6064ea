"""Add control entries to a tokenizer, after all its ids, so that datasets prepared with it stay
valid.

Guarantees: every id keeps its meaning, and every text its ids, because new entries are control
entries. The result is a folder that transformers loads. A model needs its embedding enlarged to the
new `vocab_size`.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from penstock.core.errors import ConfigError, TokenizerError
from penstock.core.json_values import JsonObject
from penstock.tokenizers.huggingface import ID_SECTIONS
from penstock.tokenizers.loading import load_tokenizer
from penstock.tokenizers.tokenizer import Tokenizer
from penstock.tokenizers.training import check_output
from tokenizers import Tokenizer as Encoder

SENTINEL = "<extra_id_{}>"
"""Names of added sentinels, as in T5."""


def add_tokens(
    tokenizer: Tokenizer | str | Path,
    tokens: Sequence[str] = (),
    *,
    sentinels: int = 0,
    output: str | Path | None = None,
    overwrite: bool = False,
) -> Tokenizer:
    """A tokenizer with more control entries.

    Args:
        tokenizer: Its vocabulary is a tokenizer.json; it is not changed.
        tokens: Texts of the new entries, such as "[NLU]".
        sentinels: Number of entries `<extra_id_0>`, `<extra_id_1>`, … to have; existing ones count.
        output: Folder to save it in.
        overwrite: Replace an existing tokenizer.

    Raises:
        ConfigError: An entry is empty, exists already, or is given twice; or there is nothing to
            add.
        TokenizerError: The vocabulary is in another format.
        OutputError: The folder holds a tokenizer already, or cannot be written.
    """
    if output is not None:
        check_output(Path(output), overwrite)
    base = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    if "tokenizer.json" not in base.source_bytes:
        raise TokenizerError(
            f"{base.name}: entries can be added to a tokenizer.json; this is a vocabulary of "
            f"kind {base.kind} in {' and '.join(base.source_bytes)}; convert it first, with "
            "transformers"
        )
    names = _new_names(base, tokens, sentinels)
    entries = [_entry(base.vocab_size + place, name) for place, name in enumerate(names)]
    made = Tokenizer(
        base.name if output is None else Path(output).resolve().name, _with_entries(base, entries)
    )
    _prove(base, made, entries)
    if output is not None:
        made.save(output)
    return made


def _new_names(base: Tokenizer, tokens: Sequence[str], sentinels: int) -> list[str]:
    """The entries to add: all of `tokens`, and the sentinels that do not exist yet."""
    wanted = [SENTINEL.format(number) for number in range(sentinels)]
    names = [*tokens, *(name for name in wanted if name not in base.special_tokens)]
    encoder = _encoder(base)
    there = [name for name in names if encoder.token_to_id(name) is not None]
    if there:
        raise ConfigError(
            f"{base.name} has {there[0]!r} already, as id {encoder.token_to_id(there[0])}; "
            "add others only"
        )
    if not names or "" in names or len(set(names)) < len(names):
        raise ConfigError(
            f"expected: new control entries, each once, none empty; got {names[:8]}; set "
            "tokens (--token) or sentinels"
        )
    return names


def _entry(token_id: int, name: str) -> JsonObject:
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {"id": token_id, "content": name, **flags}


def _with_entries(base: Tokenizer, entries: list[JsonObject]) -> dict[str, bytes]:
    """The files of `base` with entries at the end; its configuration lists them where it lists such
    tokens.
    """
    files = dict(base.source_bytes)
    content = json.loads(files["tokenizer.json"])
    content["added_tokens"] = [*(content.get("added_tokens") or []), *entries]
    files["tokenizer.json"] = json.dumps(content, ensure_ascii=False, indent=2).encode()
    if "tokenizer_config.json" in files:
        config = json.loads(files["tokenizer_config.json"])
        if "additional_special_tokens" in config:
            config["additional_special_tokens"] += [entry["content"] for entry in entries]
        if "added_tokens_decoder" in config:
            described = {
                str(entry["id"]): {k: v for k, v in entry.items() if k != "id"} for entry in entries
            }
            config["added_tokens_decoder"].update(described)
        files["tokenizer_config.json"] = json.dumps(config, ensure_ascii=False, indent=2).encode()
    return files


def _prove(base: Tokenizer, made: Tokenizer, entries: list[JsonObject]) -> None:
    """Raise unless ids kept their meaning and the tokenizers package gives the new entries the ids
    in the file.
    """
    reason = difference(base, made)
    encoder = _encoder(made)
    wrong = [entry for entry in entries if encoder.token_to_id(entry["content"]) != entry["id"]]
    if wrong:
        found = encoder.token_to_id(wrong[0]["content"])
        reason = (
            f"the tokenizers package makes {wrong[0]['content']!r} id {found}, expected: "
            f"{wrong[0]['id']}"
        )
    if reason is not None:
        raise TokenizerError(
            f"{base.name}: entries cannot be added: {reason}; the ids of its added_tokens "
            "have gaps; close them first"
        )


def _encoder(tokenizer: Tokenizer) -> Encoder:
    return Encoder.from_str(tokenizer.source_bytes["tokenizer.json"].decode())


def difference(base: Tokenizer, extended: Tokenizer) -> str | None:
    """Why ids of `base` do not mean the same in `extended`; None if they do. Compares every id."""
    if base.fingerprint == extended.fingerprint:
        return None
    if extended.vocab_size < base.vocab_size:
        return f"it has {extended.vocab_size:,} ids, fewer than {base.vocab_size:,}"
    for text, token_id in base.special_tokens.items():
        if extended.special_tokens.get(text) != token_id:
            return (
                f"control entry {text!r} is {extended.special_tokens.get(text)} in it, not "
                f"{token_id}"
            )
    for token_id, (old, new) in enumerate(zip(_spelled(base), _spelled(extended), strict=False)):
        if old != new and token_id not in extended.special_tokens.values():
            return f"id {token_id} is {new!r} in it, not {old!r}"
    return None


def not_extended(base: Tokenizer, longer: Tokenizer) -> str | None:
    """Why a tokenizer is not `base` plus entries, which cuts and numbers all other text as that
    does; None if it is.
    """
    reason = difference(base, longer)
    if reason is not None or base.fingerprint == longer.fingerprint or base.kind != longer.kind:
        return reason
    if "tokenizer.json" not in base.source_bytes or "tokenizer.json" not in longer.source_bytes:
        return f"its vocabulary of kind {longer.kind} is another"
    before, after = (json.loads(one.source_bytes["tokenizer.json"]) for one in (base, longer))
    for section in ID_SECTIONS:
        if section != "added_tokens" and before.get(section) != after.get(section):
            return f"section {section} of its tokenizer.json is another"
    entries = {entry["id"]: entry for entry in after.get("added_tokens") or []}
    changed = [one for one in before.get("added_tokens") or [] if entries.get(one["id"]) != one]
    return f"its entry {changed[0]['content']!r} is matched in another way" if changed else None


def _spelled(tokenizer: Tokenizer) -> Iterator[bytes | str]:
    """What each id spells: its bytes if there is an exact table, else its decoded text."""
    try:
        table = tokenizer.byte_table
    except TokenizerError:
        return (tokenizer.decode([token_id]) for token_id in range(tokenizer.vocab_size))
    data, edges = table.data.tobytes(), table.offsets.tolist()
    return (data[begin:end] for begin, end in pairwise(edges))
