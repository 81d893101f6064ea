"""Byte-pair vocabularies in files: tiktoken's, Mistral's `tekken.json`, and `vocab.json` with `merges.txt`.

Vocabularies that are a list of ranked byte strings: tiktoken's `.tiktoken` files and Mistral's `tekken.json`.

A `.tiktoken` file holds neither its splitting pattern nor its control entries. Both are known for the encodings that
OpenAI publishes, by file name, and for Meta's Llama 3 (the same format, named `tokenizer.model`), by its number of
ranks. Any other file needs a pattern, which is then stored next to it in `encoding.json`.

`vocab.json` and `merges.txt`: the byte-level BPE of GPT-2's first release, as a `tokenizer.json`.

The two files say neither how text is split nor which entries are control. `tokenizer_config.json`,
`special_tokens_map.json` and `added_tokens.json` next to them give the class, which decides both, and more entries.
Without these files the class is GPT-2's. Ids are those of the class's fast tokenizer in transformers.
"""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

from penstock.core.errors import TokenizerError
from penstock.tokenizers.post_processors import text_template
from penstock.tokenizers.vocabulary import (
    BEGIN_NAMES,
    END_NAMES,
    PAD_NAMES,
    AddedEntry,
    ByteTable,
    Positioned,
    named_control,
    plain_cuts,
    split_at_controls,
)

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Also tiktoken's older form of the pattern of cl100k_base."""
QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K_PATTERN = "|".join([*(word + _SHORT for word in _WORDS), r"\p{N}{1,3}", _REST])
TEKKEN_PATTERN = "|".join([*_WORDS, r"\p{N}", _REST])

SCHEMES = {
    GPT2_PATTERN: "gpt2",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    CL100K_PATTERN: "gpt4",
    LLAMA3_PATTERN: "olmo3",
    QWEN2_PATTERN: "qwen2",
    O200K_PATTERN: "o200k",
    TEKKEN_PATTERN: "nemotron",
}
"""Pattern → gigatoken's name for it; tests check each against tiktoken. Some patterns have several forms."""

_FILL = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276}
PUBLISHED: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": (GPT2_PATTERN, {"<|endoftext|>": 50256}),
    "r50k_base": (GPT2_PATTERN, {"<|endoftext|>": 50256}),
    "p50k_base": (GPT2_PATTERN, {"<|endoftext|>": 50256}),
    "cl100k_base": (CL100K_PATTERN, {"<|endoftext|>": 100257} | _FILL),
    "o200k_base": (O200K_PATTERN, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}
"""File name → pattern and control entries. Source: tiktoken_ext/openai_public.py of tiktoken 0.14."""

LLAMA3_RANKS = 128_000
"""Number of ranks in Llama 3's file; no other published file has this number."""


def llama3_controls(*, is_later: bool) -> dict[str, int]:
    """The 256 control entries of Llama 3, or of 3.1 and later; their ids follow the ranks.

    Source: `llama/tokenizer.py` of meta-llama/llama3; the later names as in the tokenizer.json of Llama 3.1.
    """
    named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
    if is_later:
        named |= {4: "finetune_right_pad_id", 8: "eom_id", 10: "python_tag"}
    free = iter(range(256))
    names = [named[place] if place in named else f"reserved_special_token_{next(free)}" for place in range(256)]
    return {f"<|{name}|>": LLAMA3_RANKS + place for place, name in enumerate(names)}


TEKKEN_CONTROLS = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]
"""Control entries of tekken files up to v7, which do not list them. Source: mistral-common, tokenizers/tekken.py."""


@final
class RankVocabulary:
    """Ranked byte strings with a splitting pattern; ids are ranks, plus a shift for tekken's control entries."""

    own_encoder = "tiktoken"
    normalization: str | None = None
    adds_space = False

    def __init__(
        self,
        kind: str,
        ranks: dict[bytes, int],
        pattern: str,
        controls: dict[str, int],
        *,
        shift: int = 0,
        size: int = 0,
    ) -> None:
        self.kind, self.controls = kind, controls
        self.unknown_id: int | None = None
        self.cuts: tuple[AddedEntry, ...] | None = plain_cuts(controls)
        self._ranks, self._pattern, self._shift = ranks, pattern, shift
        self.size = max(size, 1 + shift + max(ranks.values()), 1 + max(controls.values(), default=-1))
        self.bos_id = named_control(controls, BEGIN_NAMES)
        self.eos_id = named_control(controls, END_NAMES)
        self.pad_id = named_control(controls, PAD_NAMES)
        # The formats do not say it. The packages of Llama 3 and of Mistral, whose files name one, put it before texts.
        self.adds_bos = self.bos_id is not None and self.bos_id != self.eos_id

    @classmethod
    def from_tiktoken(cls, content: bytes, encoding: bytes) -> "RankVocabulary":
        """Read a `.tiktoken` file and its `encoding.json`: `{"pattern": …, "special_tokens": {…}}`."""
        settings = json.loads(encoding)
        return cls("tiktoken", parse_ranks(content), settings["pattern"], dict(settings["special_tokens"]))

    @classmethod
    def from_tekken(cls, content: bytes) -> "RankVocabulary":
        """Read a `tekken.json`: control entries come first, ids are ranks plus their number."""
        parsed = json.loads(content)
        config = parsed["config"]
        shift, size = config["default_num_special_tokens"], config["default_vocab_size"]
        listed = parsed.get("special_tokens")
        names = TEKKEN_CONTROLS if listed is None else [entry["token_str"] for entry in listed]
        controls = {name: place for place, name in enumerate(names)}
        controls |= {f"<SPECIAL_{place}>": place for place in range(len(names), shift)}
        ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in parsed["vocab"][: size - shift]}
        return cls("tekken", ranks, config["pattern"], controls, shift=shift, size=size)

    def identity(self) -> bytes:
        """See `Vocabulary`."""
        settings = {"pattern": self._pattern, "controls": self.controls, "shift": self._shift}
        return json.dumps(settings, sort_keys=True).encode() + self._rank_file()

    def encode(self, text: str, *, allow_control: bool) -> list[int]:
        """See `Vocabulary`."""
        pieces = split_at_controls(text, self.controls) if allow_control else [text]
        ids: list[int] = []
        for piece in pieces:
            ids += [piece] if isinstance(piece, int) else self.encode_batch([piece])[0]
        return ids

    def inner_files(self, files: Mapping[str, bytes]) -> None:
        """See `Vocabulary`."""

    def encode_with_positions(self, text: str, *, allow_control: bool) -> Positioned:
        """See `Vocabulary`; never needed, because the byte table is always exact."""
        raise TokenizerError("tiktoken gives no positions; the byte table does")

    def encode_disguised(self, text: str, controls: Sequence[tuple[int, int, str]]) -> Positioned:
        """See `Vocabulary`; never needed, because text is cut at control entries."""
        raise TokenizerError("this vocabulary cuts text at its control entries; encode the stretches between them")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Vocabulary`."""
        encoded = (self._encoding.encode_ordinary(text) for text in texts)
        return [[rank + self._shift for rank in ranks] if self._shift else ranks for ranks in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """See `Vocabulary`; never needed, because the byte table is always exact."""
        return self.build_byte_table(exact=True).spell(ids).tobytes().decode(errors="replace")

    def build_fast(self) -> tuple[Any, int]:
        """See `Vocabulary`."""
        from penstock.tokenizers.fast import backend_from_merged_ranks, backend_from_ranks

        if self._pattern not in SCHEMES:
            raise TokenizerError(
                f"gigatoken cannot encode it: it does not know the splitting pattern {self._pattern!r}"
            )
        if self._pattern == LLAMA3_PATTERN:
            return backend_from_merged_ranks(self._ranks, self._pattern), self._shift
        return backend_from_ranks(self._rank_file(), SCHEMES[self._pattern]), self._shift

    def build_byte_table(self, *, exact: bool) -> ByteTable:
        """See `Vocabulary`."""
        entries: list[bytes | None] = [None] * self.size
        for token, rank in self._ranks.items():
            entries[rank + self._shift] = token
        return ByteTable(entries)

    def _rank_file(self) -> bytes:
        return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in self._ranks.items())

    @cached_property
    def _encoding(self) -> Any:
        import tiktoken

        return tiktoken.Encoding("penstock", pat_str=self._pattern, mergeable_ranks=self._ranks, special_tokens={})


def looks_like_ranks(content: bytes) -> bool:
    """Whether a file begins as one of tiktoken ranks does."""
    return re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)", content[:4096]) is not None


def parse_ranks(content: bytes) -> dict[bytes, int]:
    """Read `base64 rank` lines.

    Raises:
        TokenizerError: A line is not of that form.
    """
    ranks = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise TokenizerError(
                f"line {number} of the ranks is {line[:60]!r}, expected: base64 of the bytes, a space, the rank"
            ) from error
    if not ranks:
        raise TokenizerError("the file of ranks is empty")
    return ranks


VOCABULARY, MERGES = "vocab.json", "merges.txt"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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
    **dict.fromkeys(("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "LEDTokenizer"), _ROBERTA),
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
    config, named = _json(folder / "tokenizer_config.json"), _json(folder / "special_tokens_map.json")
    kind = _kind(config.get("tokenizer_class"), vocabulary)
    roles = {role: value for role in _ROLES if (value := config.get(role, named.get(role))) is not None}
    ids = {**json.loads(vocabulary), **_json(folder / "added_tokens.json"), **_decoder(config)}
    texts = [*kind.controls, *map(_text, roles.values())]
    for listed in (named, config):
        texts += map(_text, listed.get("additional_special_tokens") or [])
    added = [_entry(text, ids[text], special=True) for text in dict.fromkeys(texts) if text in ids]
    own, known = json.loads(vocabulary), {entry["content"] for entry in added}
    added += [_entry(text, i, special=False) for text, i in ids.items() if text not in own and text not in known]
    lines = merges.decode("utf-8").splitlines()
    pairs = [line for line in lines if line.strip() and not line.startswith("#version")]
    made = {
        "version": "1.0",
        "added_tokens": sorted(added, key=lambda entry: int(entry["id"])),
        "normalizer": None if kind.normalizer is None else {"type": kind.normalizer},
        "pre_tokenizer": _cutting(kind, bool(config.get("add_prefix_space"))),
        "post_processor": _framing(kind, config, roles, ids),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": own, "merges": [line.split(" ") for line in pairs]},
    }
    files = {"tokenizer.json": json.dumps(made, ensure_ascii=False).encode()}
    if config or roles:
        files["tokenizer_config.json"] = json.dumps({**config, **roles}, ensure_ascii=False).encode()
    return files


def _required(path: Path) -> bytes:
    if not path.is_file():
        other = VOCABULARY if path.name == MERGES else MERGES
        raise TokenizerError(f"{other} is one half of a vocabulary; {path.name} is expected next to it")
    return path.read_bytes()


def _json(path: Path) -> dict[str, Any]:
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
            f"how it splits text is unknown: {found}; known classes are {', '.join(_KINDS)}; make a "
            "tokenizer.json with transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER)"
        )
    return kind


def _decoder(config: Mapping[str, Any]) -> dict[str, int]:
    return {_text(entry): int(i) for i, entry in (config.get("added_tokens_decoder") or {}).items()}


def _text(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)


def _entry(text: str, token_id: int, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": text == "<mask>", "rstrip": False, "normalized": not special}
    return {"id": int(token_id), "content": text, "special": special, **flags}


def _framing(
    kind: _Kind, config: Mapping[str, Any], roles: Mapping[str, Any], ids: Mapping[str, int]
) -> dict[str, Any] | None:
    """The post-processor that adds BOS and EOS as the class does: by `add_bos_token` and `add_eos_token`, or always."""
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
    return text_template(*({text: ids[text] for text in [named.get(role)] if text} for role in ("bos", "eos")))


def _cutting(kind: _Kind, add_prefix_space: bool) -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True}
    if kind.pattern is None:
        return {**level, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": kind.pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**level, "use_regex": False}]}
