"""`vocab.json` and `merges.txt`: the byte-level BPE of GPT-2's first release, as a
`tokenizer.json`.

The two files say neither how text is split nor which entries are control. `tokenizer_config.json`,
`special_tokens_map.json` and `added_tokens.json` next to them give the class, which decides both,
and more entries. Without these files the class is GPT-2's. Ids are those of the class's fast
tokenizer in transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from penstock.core.errors import TokenizerError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.tokenizers.post_processors import text_template
from penstock.tokenizers.split_patterns import QWEN2_PATTERN

VOCABULARY, MERGES = "vocab.json", "merges.txt"
_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What a class of transformers implies."""

    controls: tuple[str, ...] = ("<|endoftext|>",)
    framed: bool = False
    """Whether its own encoding puts <s> and </s> around a text, whatever the configuration says."""
    pattern: str | None = None
    """How text is split; None: as in GPT-2."""
    normalizer: str | None = None


_GPT2, _ROBERTA = _Kind(), _Kind(controls=("<s>", "<pad>", "</s>", "<unk>", "<mask>"), framed=True)
_KINDS = {
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer"), _GPT2),
    **dict.fromkeys(
        ("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "LEDTokenizer"), _ROBERTA
    ),
    "Qwen2Tokenizer": _Kind(pattern=QWEN2_PATTERN, normalizer="NFC"),
}


def files_of_merges(path: Path) -> dict[str, bytes]:
    """The canonical files of the vocabulary that `path`, one of the two files, belongs to.

    Raises:
        TokenizerError: The other file is missing, or the class is unknown.
    """
    folder = path.parent
    vocabulary = _required(folder / VOCABULARY)
    merges = _required(folder / MERGES)
    config, named = (
        _json(folder / "tokenizer_config.json"),
        _json(folder / "special_tokens_map.json"),
    )
    kind = _kind(config.get("tokenizer_class"), vocabulary)
    roles = {
        role: value for role in _ROLES if (value := config.get(role, named.get(role))) is not None
    }
    ids = {**json.loads(vocabulary), **_json(folder / "added_tokens.json"), **_decoder(config)}
    texts = [*kind.controls, *map(_text, roles.values())]
    for listed in (named, config):
        texts += map(_text, listed.get("additional_special_tokens") or [])
    added = [_entry(text, ids[text], special=True) for text in dict.fromkeys(texts) if text in ids]
    own, known = json.loads(vocabulary), {entry["content"] for entry in added}
    added += [
        _entry(text, i, special=False)
        for text, i in ids.items()
        if text not in own and text not in known
    ]
    lines = merges.decode("utf-8").splitlines()
    pairs = [line for line in lines if line.strip() and not line.startswith("#version")]
    made = {
        "version": "1.0",
        "added_tokens": sorted(added, key=lambda entry: int(entry["id"])),
        "normalizer": None if kind.normalizer is None else {"type": kind.normalizer},
        "pre_tokenizer": _cutting(kind, bool(config.get("add_prefix_space"))),
        "post_processor": _framing(kind, config, roles, ids),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "BPE", "vocab": own, "merges": [line.split(" ") for line in pairs]},
    }
    files = {"tokenizer.json": json.dumps(made, ensure_ascii=False).encode()}
    if config or roles:
        files["tokenizer_config.json"] = json.dumps(
            {**config, **roles}, ensure_ascii=False
        ).encode()
    return files


def _required(path: Path) -> bytes:
    if not path.is_file():
        other = VOCABULARY if path.name == MERGES else MERGES
        raise TokenizerError(
            f"{other} is one half of a vocabulary; {path.name} is expected next to it"
        )
    return path.read_bytes()


def _json(path: Path) -> JsonObject:
    found = json.loads(path.read_bytes()) if path.is_file() else {}
    if not isinstance(found, dict):
        raise TokenizerError(f"{path.name} next to it is not a JSON object")
    return found


def _kind(name: str | None, vocabulary: bytes) -> _Kind:
    if name is None and b'</w>"' not in vocabulary:
        return _GPT2
    kind = _KINDS.get(str(name).removesuffix("Fast"))
    if kind is None:
        found = "its tokens end in </w>" if name is None else f"its class is {name}"
        raise TokenizerError(
            f"how it splits text is unknown: {found}; known classes are {', '.join(_KINDS)}; "
            "make a tokenizer.json with "
            "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER)"
        )
    return kind


def _decoder(config: JsonMapping) -> dict[str, int]:
    return {_text(entry): int(i) for i, entry in (config.get("added_tokens_decoder") or {}).items()}


def _text(value: object) -> str:
    return str(value["content"] if isinstance(value, dict) else value)


def _entry(text: str, token_id: int, *, special: bool) -> JsonObject:
    flags = {
        "single_word": False,
        "lstrip": text == "<mask>",
        "rstrip": False,
        "normalized": not special,
    }
    return {"id": int(token_id), "content": text, "special": special, **flags}


def _framing(
    kind: _Kind, config: JsonMapping, roles: JsonMapping, ids: Mapping[str, int]
) -> JsonObject | None:
    """The post-processor that adds BOS and EOS as the class does: by `add_bos_token` and
    `add_eos_token`, or always.
    """
    if kind.framed:
        named = {"bos": "<s>", "eos": "</s>"}
    else:
        named = {
            role: _text(roles[f"{role}_token"])
            for role in ("bos", "eos")
            if config.get(f"add_{role}_token") and f"{role}_token" in roles
        }
    if not named or any(text not in ids for text in named.values()):
        return None
    return text_template(
        *({text: ids[text] for text in [named.get(role)] if text} for role in ("bos", "eos"))
    )


def _cutting(kind: _Kind, add_prefix_space: bool) -> JsonObject:
    level = {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True}
    if kind.pattern is None:
        return {**level, "use_regex": True}
    split = {
        "type": "Split",
        "pattern": {"Regex": kind.pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, {**level, "use_regex": False}]}
