"""Train a byte-level BPE, or add control entries behind all ids that a tokenizer has.

Train a byte-level BPE: any text can be encoded, and every id has exact bytes.

Text is first split by GPT-4's pattern with one digit per piece (the pattern of Qwen 2); merges do not cross pieces.
nanochat measured 0.969, 0.965 and 0.972 bits per byte with up to 1, 2 and 3 digits per piece. No published tokenizer
uses 2, so gigatoken has no fast path for it; 1 is better than 3, and makes numbers align.

Guarantees: the same texts give the same file, byte for byte, which is that of the trainer of the `tokenizers`
package. Costs: 1.3 to 2 s of CPU for 22 MB and 4,096 to 32,768 ids; memory grows with the number of distinct words, not
with the size of the text.

Add control entries to a tokenizer, after all its ids, so that datasets prepared with it stay valid.

Guarantees: every id keeps its meaning, and every text its ids, because new entries are control entries. The
result is a folder that transformers loads. A model needs its embedding enlarged to the new `vocab_size`.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, OutputError, TokenizerError
from penstock.core.folders import local_path
from penstock.core.suggestions import suggests
from penstock.core.terminal import Progress
from penstock.tokenizers.huggingface import ID_SECTIONS
from penstock.tokenizers.loading import load_tokenizer
from penstock.tokenizers.merges import PieceCounts, learn_merges
from penstock.tokenizers.tokenizer import Tokenizer

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
"""Control entries that every trained tokenizer has, as ids 0, 1 and 2."""

BATCH_BYTES = 1 << 20
"""Batch size of text, in bytes. Less than that is left to the `tokenizers` package, which
learns the same merges more slowly, but has no kernels that may have to be compiled first."""


@suggests
def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int,
    output: str | Path,
    special_tokens: Sequence[str] = (),
    overwrite: bool = False,
    progress: bool = True,
    total_bytes: int | None = None,
) -> Tokenizer:
    """Train a byte-level BPE and save it as `tokenizer.json` and `tokenizer_config.json`, as transformers loads them.

    Args:
        texts: The texts to learn from; read once.
        vocab_size: Number of ids: 256 bytes, control entries, and merges. Fewer if the text has no more to merge.
        output: Folder to save in.
        special_tokens: Control entries in addition to BOS, EOS and padding; ids from 3 on.
        overwrite: Replace an existing tokenizer.
        progress: Show a bar on standard error.
        total_bytes: Approximate number of bytes of text, for the bar.

    Raises:
        ConfigError: The vocabulary is too small for the bytes and control entries, or an entry is given twice.
        TokenizerError: There was no text.
        OutputError: The folder holds a tokenizer already, or cannot be written; raised before any text is read.
    """
    controls = [BOS, EOS, PAD, *special_tokens]
    _check_settings(vocab_size, controls)
    check_output(Path(output), overwrite)
    batches = _read(texts, total_bytes, progress)
    first, second = next(batches), next(batches, None)
    if not any(first):
        raise TokenizerError("no text to train on: every source was empty")
    if second is None:
        with Progress("learning merges", enabled=progress):
            model = _train_small(first, controls, vocab_size)
    else:
        pieces = PieceCounts()
        for batch in chain((first, second), batches):
            pieces.add(batch)
        with Progress("learning merges", enabled=progress):
            model = _train(pieces, controls, vocab_size)
    tokenizer = Tokenizer(
        Path(output).resolve().name,
        {"tokenizer.json": model.to_str(pretty=True).encode(), "tokenizer_config.json": _config(special_tokens)},
    )
    tokenizer.save(output)
    return tokenizer


def _read(texts: Iterable[str], total_bytes: int | None, progress: bool) -> Iterator[list[bytes]]:
    """The texts in UTF-8, in batches of about `BATCH_BYTES`; one empty batch if there is no text."""
    batch: list[bytes] = []
    waiting = 0
    with Progress("reading text", total=total_bytes, unit="B", enabled=progress) as bar:
        for text in texts:
            data = text.encode()
            bar.advance(len(data), texts=1)
            if waiting >= BATCH_BYTES:
                yield batch
                batch, waiting = [], 0
            batch.append(data)
            waiting += len(data)
    yield batch


def _check_settings(vocab_size: int, controls: Sequence[str]) -> None:
    if len(set(controls)) < len(controls) or "" in controls:
        raise ConfigError(
            f"special_tokens must be distinct, not empty, and none of {BOS}, {EOS}, {PAD}; got {list(controls[3:])}"
        )
    if vocab_size < 256 + len(controls):
        raise ConfigError(
            f"vocab_size must be at least {256 + len(controls)}, for 256 bytes and {len(controls)} control entries; "
            f"got {vocab_size}"
        )


def check_output(folder: Path, overwrite: bool) -> None:
    """Make `folder`, and raise OutputError if a tokenizer cannot be saved in it, or exists there already."""
    local_path(folder, "a tokenizer's folder")
    there = [name for name in ("tokenizer.json", "tokenizer_config.json") if (folder / name).exists()]
    if there and not overwrite:
        raise OutputError(
            f"{folder / there[0]}: exists already, and datasets prepared with it would not match a new one; "
            "choose another folder, or set overwrite to replace it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error.strerror}; choose another folder") from error
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{folder}: is read-only; choose another folder")


def _train(pieces: PieceCounts, controls: Sequence[str], vocab_size: int) -> Any:
    from tokenizers import AddedToken, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries, pairs = learn_merges(pieces, list(dict.fromkeys([*controls, *alphabet])), vocab_size)
    merges = [(entries[left], entries[right]) for left, right in pairs]
    model = _untrained()
    model.model = models.BPE({entry: place for place, entry in enumerate(entries)}, merges)
    model.add_special_tokens([AddedToken(control, special=True, normalized=False) for control in controls])
    return model


def _train_small(texts: Sequence[bytes], controls: Sequence[str], vocab_size: int) -> Any:
    """The same with the trainer of the `tokenizers` package."""
    from tokenizers import pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(controls),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model = _untrained()
    model.train_from_iterator((text.decode() for text in texts), trainer)
    return model


def _untrained() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _config(special_tokens: Sequence[str]) -> bytes:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": list(special_tokens),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),
    }
    return json.dumps(settings, indent=2).encode()


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
        ConfigError: An entry is empty, exists already, or is given twice; or there is nothing to add.
        TokenizerError: The vocabulary is in another format.
        OutputError: The folder holds a tokenizer already, or cannot be written.
    """
    if output is not None:
        check_output(Path(output), overwrite)
    base = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    if "tokenizer.json" not in base.source_bytes:
        raise TokenizerError(
            f"{base.name}: entries can be added to a tokenizer.json; this is a vocabulary of kind {base.kind} in "
            f"{' and '.join(base.source_bytes)}; convert it first, with transformers"
        )
    names = _new_names(base, tokens, sentinels)
    entries = [_entry(base.vocab_size + place, name) for place, name in enumerate(names)]
    made = Tokenizer(base.name if output is None else Path(output).resolve().name, _with_entries(base, entries))
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
            f"{base.name} has {there[0]!r} already, as id {encoder.token_to_id(there[0])}; add others only"
        )
    if not names or "" in names or len(set(names)) < len(names):
        raise ConfigError(
            f"expected: new control entries, each once, none empty; got {names[:8]}; set tokens (--token) or sentinels"
        )
    return names


def _entry(token_id: int, name: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": name, **flags}


def _with_entries(base: Tokenizer, entries: list[dict[str, Any]]) -> dict[str, bytes]:
    """The files of `base` with entries at the end; its configuration lists them where it lists such tokens."""
    files = dict(base.source_bytes)
    content = json.loads(files["tokenizer.json"])
    content["added_tokens"] = [*(content.get("added_tokens") or []), *entries]
    files["tokenizer.json"] = json.dumps(content, ensure_ascii=False, indent=2).encode()
    if "tokenizer_config.json" in files:
        config = json.loads(files["tokenizer_config.json"])
        if "additional_special_tokens" in config:
            config["additional_special_tokens"] += [entry["content"] for entry in entries]
        if "added_tokens_decoder" in config:
            described = {str(entry["id"]): {k: v for k, v in entry.items() if k != "id"} for entry in entries}
            config["added_tokens_decoder"].update(described)
        files["tokenizer_config.json"] = json.dumps(config, ensure_ascii=False, indent=2).encode()
    return files


def _prove(base: Tokenizer, made: Tokenizer, entries: list[dict[str, Any]]) -> None:
    """Raise unless ids kept their meaning and the tokenizers package gives the new entries the ids in the file."""
    reason = difference(base, made)
    encoder = _encoder(made)
    wrong = [entry for entry in entries if encoder.token_to_id(entry["content"]) != entry["id"]]
    if wrong:
        found = encoder.token_to_id(wrong[0]["content"])
        reason = f"the tokenizers package makes {wrong[0]['content']!r} id {found}, expected: {wrong[0]['id']}"
    if reason is not None:
        raise TokenizerError(
            f"{base.name}: entries cannot be added: {reason}; the ids of its added_tokens have gaps; close them first"
        )


def _encoder(tokenizer: Tokenizer) -> Any:
    from tokenizers import Tokenizer as Encoder

    return Encoder.from_str(tokenizer.source_bytes["tokenizer.json"].decode())


def difference(base: Tokenizer, extended: Tokenizer) -> str | None:
    """Why ids of `base` do not mean the same in `extended`; None if they do. Compares every id."""
    if base.fingerprint == extended.fingerprint:
        return None
    if extended.vocab_size < base.vocab_size:
        return f"it has {extended.vocab_size:,} ids, fewer than {base.vocab_size:,}"
    for text, token_id in base.special_tokens.items():
        if extended.special_tokens.get(text) != token_id:
            return f"control entry {text!r} is {extended.special_tokens.get(text)} in it, not {token_id}"
    for token_id, (old, new) in enumerate(zip(_spelled(base), _spelled(extended), strict=False)):
        if old != new and token_id not in extended.special_tokens.values():
            return f"id {token_id} is {new!r} in it, not {old!r}"
    return None


def not_extended(base: Tokenizer, longer: Tokenizer) -> str | None:
    """Why a tokenizer is not `base` plus entries, which cuts and numbers all other text as that does; None if it is."""
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
