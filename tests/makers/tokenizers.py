"""Tiny tokenizers and chat templates."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock import train_tokenizer
from penstock.tokenizers import Tokenizer

CHAT_CONTROLS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def tiny_tokenizer(
    folder: Path, texts: Iterable[str], size: int, controls: Sequence[str] = ()
) -> Tokenizer:
    """A byte-level BPE of at most `size` ids that learned from a few texts, saved in `folder`."""
    return train_tokenizer(
        texts, vocab_size=size, output=folder, special_tokens=controls, progress=False
    )


def added_token(text: str, token_id: int, **flags: bool) -> dict[str, Any]:
    """An entry of `added_tokens`: a control token unless `flags` say otherwise."""
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {"id": token_id, "content": text, **plain, **flags}


def tokenizer_json(
    model: dict[str, Any], added: Sequence[dict[str, Any]], **sections: Any
) -> dict[str, Any]:
    """The parts of a tokenizer.json; sections that are not given are null."""
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return {
        "version": "1.0",
        **dict.fromkeys(names),
        "added_tokens": added,
        "model": model,
        **sections,
    }


def bpe_without_merges(
    name: str, vocabulary: Mapping[str, int], controls: Mapping[str, int], **sections: Any
) -> Tokenizer:
    """A byte-level BPE that keeps the given ids: text → id of ordinary tokens, in GPT-2's letters,
    and of controls.
    """
    added = [
        added_token(text, token_id)
        for text, token_id in sorted(controls.items(), key=lambda item: item[1])
    ]
    described = tokenizer_json(
        {"type": "BPE", "vocab": dict(vocabulary), "merges": []},
        added,
        pre_tokenizer=BYTE_LEVEL | {"use_regex": False},
        decoder=BYTE_LEVEL | {"add_prefix_space": True},
        **sections,
    )
    return Tokenizer(name, {"tokenizer.json": json.dumps(described).encode()})


def byte_tokenizer(*controls: str) -> Tokenizer:
    """One id a byte: id = byte, then the control tokens."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    # GPT-2's letter of each byte.
    letters = {chr(byte): byte for byte in plain} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }
    return bpe_without_merges(
        "bytes", letters, {text: 256 + place for place, text in enumerate(controls)}
    )


def byte_ranks(*words: bytes) -> dict[bytes, int]:
    """Ranks of all bytes, then of some words with the merges that they need."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for word in words:
        for end in range(2, len(word) + 1):
            ranks.setdefault(word[:end], len(ranks))
    return ranks
