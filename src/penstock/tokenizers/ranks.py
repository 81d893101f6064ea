"""Vocabularies that are a list of ranked byte strings: tiktoken's `.tiktoken` files and Mistral's
`tekken.json`.

A `.tiktoken` file holds neither its splitting pattern nor its control entries. Both are known for
the encodings that OpenAI publishes, by file name, and for Meta's Llama 3 (the same format, named
`tokenizer.model`), by its number of ranks. Any other file needs a pattern, which is then stored
next to it in `encoding.json`.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, final

from penstock.core.errors import TokenizerError
from penstock.tokenizers.byte_table import ByteTable
from penstock.tokenizers.fast import FastEncoder, backend_from_merged_ranks, backend_from_ranks
from penstock.tokenizers.split_patterns import (
    CL100K_PATTERN,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    O200K_PATTERN,
    SCHEMES,
)
from penstock.tokenizers.vocabulary import (
    BEGIN_NAMES,
    END_NAMES,
    PAD_NAMES,
    AddedEntry,
    Positioned,
    named_control,
    plain_cuts,
    split_at_controls,
)

if TYPE_CHECKING:
    from tiktoken import Encoding

_FILL = {
    "<|fim_prefix|>": 100258,
    "<|fim_middle|>": 100259,
    "<|fim_suffix|>": 100260,
    "<|endofprompt|>": 100276,
}
PUBLISHED: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": (GPT2_PATTERN, {"<|endoftext|>": 50256}),
    "r50k_base": (GPT2_PATTERN, {"<|endoftext|>": 50256}),
    "p50k_base": (GPT2_PATTERN, {"<|endoftext|>": 50256}),
    "cl100k_base": (CL100K_PATTERN, {"<|endoftext|>": 100257} | _FILL),
    "o200k_base": (O200K_PATTERN, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}
"""File name → pattern and control entries. Source: tiktoken_ext/openai_public.py of tiktoken
0.14.
"""

LLAMA3_RANKS = 128_000
"""Number of ranks in Llama 3's file; no other published file has this number."""

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
"""Control entries of tekken files up to v7, which do not list them. Source: mistral-common,
tokenizers/tekken.py.
"""


def llama3_controls(*, is_later: bool) -> dict[str, int]:
    """The 256 control entries of Llama 3, or of 3.1 and later; their ids follow the ranks.

    Source: `llama/tokenizer.py` of meta-llama/llama3; the later names as in the tokenizer.json of
    Llama 3.1.
    """
    named = {
        0: "begin_of_text",
        1: "end_of_text",
        6: "start_header_id",
        7: "end_header_id",
        9: "eot_id",
    }
    if is_later:
        named |= {4: "finetune_right_pad_id", 8: "eom_id", 10: "python_tag"}
    free = iter(range(256))
    names = [
        named[place] if place in named else f"reserved_special_token_{next(free)}"
        for place in range(256)
    ]
    return {f"<|{name}|>": LLAMA3_RANKS + place for place, name in enumerate(names)}


@final
class RankVocabulary:
    """Ranked byte strings with a splitting pattern; ids are ranks, plus a shift for tekken's
    control entries.
    """

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
        self.size = max(
            size, 1 + shift + max(ranks.values()), 1 + max(controls.values(), default=-1)
        )
        self.bos_id = named_control(controls, BEGIN_NAMES)
        self.eos_id = named_control(controls, END_NAMES)
        self.pad_id = named_control(controls, PAD_NAMES)
        # The formats do not say it. The packages of Llama 3 and of Mistral, whose files name one,
        # put it before texts.
        self.adds_bos = self.bos_id is not None and self.bos_id != self.eos_id

    @classmethod
    def from_tiktoken(cls, content: bytes, encoding: bytes) -> "RankVocabulary":
        """Read a `.tiktoken` file and its `encoding.json`: `{"pattern": …, "special_tokens":
        {…}}`.
        """
        settings = json.loads(encoding)
        return cls(
            "tiktoken", parse_ranks(content), settings["pattern"], dict(settings["special_tokens"])
        )

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
        ranks = {
            base64.b64decode(entry["token_bytes"]): entry["rank"]
            for entry in parsed["vocab"][: size - shift]
        }
        return cls("tekken", ranks, config["pattern"], controls, shift=shift, size=size)

    def identity(self) -> tuple[bytes, bytes]:
        """See `Vocabulary`."""
        settings = {"pattern": self._pattern, "controls": self.controls, "shift": self._shift}
        return json.dumps(settings, sort_keys=True).encode(), self._rank_file()

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
        raise TokenizerError(
            "this vocabulary cuts text at its control entries; encode the stretches between them"
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Vocabulary`."""
        encoded = (self._encoding.encode_ordinary(text) for text in texts)
        return [
            [rank + self._shift for rank in ranks] if self._shift else ranks for ranks in encoded
        ]

    def sample_encoder(self, texts: Sequence[str]) -> Callable[[Sequence[str]], list[list[int]]]:
        """See `Vocabulary`."""
        return self.encode_batch

    def decode(self, ids: Sequence[int]) -> str:
        """See `Vocabulary`; never needed, because the byte table is always exact."""
        return self.build_byte_table(exact=True).spell(ids).tobytes().decode(errors="replace")

    def build_fast(self, missing: str | None) -> FastEncoder:
        """See `Vocabulary`."""
        if missing is not None:
            raise TokenizerError(missing)
        if self._pattern not in SCHEMES:
            raise TokenizerError(
                "gigatoken cannot encode it: it does not know the splitting pattern "
                f"{self._pattern!r}"
            )
        if self._pattern == LLAMA3_PATTERN:
            backend = backend_from_merged_ranks(self._ranks, self._pattern)
        else:
            backend = backend_from_ranks(self._rank_file(), SCHEMES[self._pattern])
        return FastEncoder(backend=backend, shift=self._shift)

    def build_byte_table(self, *, exact: bool) -> ByteTable:
        """See `Vocabulary`."""
        entries: list[bytes | None] = [None] * self.size
        for token, rank in self._ranks.items():
            entries[rank + self._shift] = token
        return ByteTable(entries)

    def _rank_file(self) -> bytes:
        return b"".join(
            base64.b64encode(token) + b" %d\n" % rank for token, rank in self._ranks.items()
        )

    @cached_property
    def _encoding(self) -> "Encoding":
        import tiktoken

        return tiktoken.Encoding(
            "penstock", pat_str=self._pattern, mergeable_ranks=self._ranks, special_tokens={}
        )


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
                f"line {number} of the ranks is {line[:60]!r}, expected: base64 of the bytes, "
                "a space, the rank"
            ) from error
    if not ranks:
        raise TokenizerError("the file of ranks is empty")
    return ranks
