"""Small vocabularies of every kind that treats control text in a way of its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from makers.tokenizers import BYTE_LEVEL, added_token, tiny_tokenizer, tokenizer_json
from penstock import load_tokenizer
from penstock.tokenizers import Tokenizer

WORDS = [
    "the",
    "pump",
    "water",
    "don't",
    "Zürich",
    "水",
    "12",
    "345",
    "def",
    "x = 1",
    "hi",
    "a",
    "\n\n",
    "user\n",
]
CONTROLS = ["<|s|>", "<|e|>", "<a>", "<<a>", "<a><|s|>", "<think>\n", "<think>", "WORD", "[X]"]


def train_base(folder: Path) -> dict[str, Any]:
    """The tokenizer.json of a byte-level BPE that we train."""
    texts = [" ".join(WORDS[place:] + WORDS[:place]) for place in range(len(WORDS))] * 3
    tiny_tokenizer(folder, texts, 330)
    parsed: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return parsed


def add(base: dict[str, Any], entries: dict[str, dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """`base` with added entries, text → flags."""
    first = 1 + max(
        [*base["model"]["vocab"].values(), *(entry["id"] for entry in base["added_tokens"])]
    )
    added = [
        added_token(text, first + i, **flags) for i, (text, flags) in enumerate(entries.items())
    ]
    return {**base, "added_tokens": [*base["added_tokens"], *added], **changes}


def metaspace_base(scheme: str) -> dict[str, Any]:
    """A BPE over `▁` with byte fallback; `scheme`: "first", "always", or "normalizer" for Llama's
    first way.
    """
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁thepumwar",
        "水",
        "▁t",
        "th",
        "he",
        "▁the",
        "▁▁",
    ]
    merges = ["▁ t", "t h", "h e", "▁t he", "▁ ▁"]
    model = {"type": "BPE", "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": merges}
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [{"type": "Prepend", "prepend": "▁"}, replace]
    by_normalizer = scheme == "normalizer"
    return tokenizer_json(
        model | {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True},
        [added_token("<unk>", 0)],
        normalizer={"type": "Sequence", "normalizers": steps} if by_normalizer else None,
        pre_tokenizer=None if by_normalizer else spaces,
    )


def word_piece_base() -> dict[str, Any]:
    """BERT's way: lower case, no whitespace, unknown words."""
    pieces = [
        "[UNK]",
        "the",
        "pump",
        "##s",
        "water",
        "hi",
        "a",
        "##a",
        "1",
        "##2",
        "[",
        "]",
        "<",
        ">",
        "|",
        "s",
        "##x",
    ]
    model = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {piece: i for i, piece in enumerate(pieces)},
    }
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    }
    added = [added_token("[UNK]", 0)]
    return tokenizer_json(
        model, added, normalizer=normalizer, pre_tokenizer={"type": "BertPreTokenizer"}
    )


def make_variants(folder: Path) -> dict[str, dict[str, Any]]:
    """Name → tokenizer.json."""
    base = train_base(folder)
    plain: dict[str, dict[str, Any]] = {text: {} for text in CONTROLS}
    spaces = {"  ": {"special": False}, "   ": {"special": False}}
    strips = {
        "<|s|>": {"rstrip": True},
        "<|e|>": {"lstrip": True},
        "<a>": {"lstrip": True, "rstrip": True},
    }
    late_strip = {"<|s|>": {"normalized": True, "rstrip": True}}
    nfc, lower = {"type": "NFC"}, {"type": "Lowercase"}
    later = {text: {**flags, "normalized": True} for text, flags in spaces.items()}
    every: Callable[[str], dict[str, dict[str, Any]]] = lambda flag: {  # noqa: E731
        text: {flag: True} for text in CONTROLS
    }  # noqa: E731, RUF100
    return {
        "plain": add(base, plain),
        "nfc": add(base, plain, normalizer=nfc),
        "prefix space": add(base, plain, pre_tokenizer=BYTE_LEVEL | {"add_prefix_space": True}),
        "strips": add(base, plain | strips),
        "space runs": add(base, plain | spaces),
        "space runs later": add(base, plain | later),
        "two passes": add(base, {"<|s|>": {}, "<|e|>": {"normalized": True}, "[X]": {}}),
        "two passes meet": add(
            base, plain | {"<a>": {"normalized": True}, "<|e|>": {"normalized": True}}
        ),
        "strips and runs": add(base, plain | strips | spaces),
        "single words": add(base, every("single_word")),
        "normalized": add(base, every("normalized"), normalizer=lower),
        "normalized strips": add(base, every("normalized") | late_strip, normalizer=nfc),
        "metaspace first": add(metaspace_base("first"), plain),
        "metaspace first strips": add(metaspace_base("first"), plain | strips),
        "metaspace always": add(metaspace_base("always"), plain),
        "metaspace content": add(metaspace_base("always"), plain | later),
        "prepend": add(metaspace_base("normalizer"), plain | strips),
        "word piece": add(word_piece_base(), plain),
        "word piece normalized": add(word_piece_base(), every("normalized")),
    }


def open_variant(parsed: dict[str, Any], folder: Path) -> Tokenizer:
    """Write and load a tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(parsed))
    return load_tokenizer(folder)
