"""An encoder of the tokenizers package from a parsed `tokenizer.json`.

A BPE goes to it as Python objects. Its own reader of JSON keeps the whole vocabulary three times
while it reads: for Gemma 3, 1.1 s and 300 MB against 0.6 s and 80 MB.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from tokenizers.models import BPE

from penstock.core.arrays import Bool
from penstock.core.errors import TokenizerError
from penstock.core.json_values import JsonObject
from penstock.core.system import without_collector
from penstock.tokenizers._written_kernels import mark_windows
from penstock.tokenizers.written_merges import WrittenMerges, dump_tokenizer_json
from penstock.tokenizers.written_vocabulary import WrittenVocabulary
from tokenizers import AddedToken, Tokenizer

_SETTINGS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


_TABLE = 1 << 21
"""Places for the windows of texts; 100 KB of text mark a few of a hundred."""


@without_collector()
def encoder_of_texts(content: JsonObject, texts: Sequence[str]) -> Tokenizer:
    """An encoder that gives some texts the ids that `load_encoder` gives them.

    BPE only ever makes tokens that are part of its text, so tokens and merges that are part of
    none of these texts can be left out, and mostly are: by windows of four bytes.

    Raises:
        TokenizerError: The tokenizers package cannot read it.
    """
    model, entries = content["model"], content.get("added_tokens") or []
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if (
        not isinstance(vocabulary, WrittenVocabulary)
        or not isinstance(merges, WrittenMerges)
        or not model.get("byte_fallback")
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
        or not _writes_characters(content.get("normalizer"), "Replace")
        or not _writes_characters(content.get("pre_tokenizer"), "Split")
        # An entry that the model lacks is numbered by the size of its vocabulary.
        or any(entry["content"] not in vocabulary for entry in entries)
    ):
        return load_encoder(content)
    settings: JsonObject = {"vocab": {}, "merges": [], "unk_token": None}
    bare = load_encoder({**content, "added_tokens": [], "model": {**model, **settings}})
    normalizer = bare.normalizer
    written = texts if normalizer is None else map(normalizer.normalize_str, texts)
    table = windows_of(written)
    needed = [f"<0x{byte:02X}>" for byte in range(256)]
    needed += [entry["content"] for entry in entries]
    needed += [model["unk_token"]] if model.get("unk_token") else []
    small = {
        "vocab": vocabulary.of_windows(table, needed),
        "merges": merges.of_windows(table),
    }
    return load_encoder({**content, "model": {**model, **small}})


def windows_of(texts: Iterable[str]) -> Bool:
    """A table of the windows that texts have, for `of_windows`."""
    table = np.zeros(_TABLE, np.bool_)
    mark_windows(np.frombuffer("\n".join(texts).encode(), np.uint8), table)
    return table


def _writes_characters(step: JsonObject | None, kind: str) -> bool:
    """Whether a step does to each character of a text the same, whatever is next to it."""
    if step is None:
        return True
    if step["type"] == "Sequence":
        inner = step.get("normalizers") or step.get("pretokenizers") or []
        return all(_writes_characters(one, kind) for one in inner)
    if step["type"] != kind:
        return False
    return kind == "Split" or len(step["pattern"].get("String", "")) == 1


@without_collector()
def load_encoder(content: JsonObject) -> Tokenizer:
    """The encoder that reading `content` as JSON gives.

    Raises:
        TokenizerError: The tokenizers package cannot read it.
    """
    model = content["model"]
    try:
        if not model.get("merges") or model.get("type", "BPE") != "BPE":
            return Tokenizer.from_buffer(dump_tokenizer_json(content))
        return _of_merges(content, model)
    except Exception as error:
        raise TokenizerError(
            f"the tokenizers package cannot read this tokenizer.json: {error}"
        ) from error


def _of_merges(content: JsonObject, model: JsonObject) -> Tokenizer:
    settings = {name: model[name] for name in _SETTINGS if model.get(name) is not None}
    bare = {**model, "vocab": {}, "merges": [], "unk_token": None, "type": "BPE"}
    made = Tokenizer.from_str(json.dumps({**content, "model": bare, "added_tokens": []}))
    made.model = BPE(dict(model["vocab"]), merge_pairs(model["merges"]), **settings)
    entries = content.get("added_tokens") or []
    for special, group in groupby(entries, lambda entry: bool(entry["special"])):
        added = [_added(entry) for entry in group]
        made.add_special_tokens(added) if special else made.add_tokens(added)
    return made


def merge_pairs(merges: Sequence[Any]) -> Sequence[tuple[str, str]]:
    """The merges of a model as pairs of tokens."""
    if isinstance(merges, WrittenMerges):
        return merges
    return [merge if isinstance(merge, tuple) else _pair(merge) for merge in merges]


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    """The two tokens of a merge: "a b" in old files, ["a", "b"] in new ones."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _added(entry: JsonObject) -> AddedToken:
    return AddedToken(entry["content"], **{flag: bool(entry[flag]) for flag in _FLAGS})
