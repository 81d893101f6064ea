"""Encoding with gigatoken: Arrow's string buffers in, two flat arrays out.

Only its encoder is used: its own file readers drop data silently after a bad line. It runs on the
calling thread, so that worker processes do not compete for cores. Loading takes 0.1 to 0.6 s,
depending on the vocabulary, and happens on first use.

Measured on one core (8.9 MB of C4, GPT-2, warm): Arrow buffers 461 MB/s, a list of bytes 408, a
list of str 468 (not counting the time to make the strings).
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, final

import numpy as np
import pyarrow as pa

from penstock.core.arrays import Array, Bytes, Int64, UInt32
from penstock.core.errors import TokenizerError
from penstock.core.json_values import JsonObject
from penstock.core.ragged import Ragged
from penstock.tokenizers.digits import DigitCuts
from penstock.tokenizers.spelling import spell_as_characters
from penstock.tokenizers.written_merges import dump_tokenizer_json

if TYPE_CHECKING:
    import awkward

T = TypeVar("T")

SLOWDOWN = 80
"""How many times as long a vocabulary's own package takes as gigatoken, measured by
`benchmarks/bench_tokenizers.py`.

One core of a Xeon, 8 MB of Python's standard library, a trained vocabulary of 16,000; with GPT-2's
vocabulary 95.
"""


class Backend(Protocol):
    """An encoder of gigatoken."""

    def encode_batch(self, texts: "awkward.Array", /, *, parallel: bool) -> "awkward.Array":
        """Ids of texts, an awkward array of lists."""

    def encode(self, text: str, /) -> UInt32:
        """Ids of a text."""


class Encoder(Protocol):
    """A fast encoder of one vocabulary."""

    @property
    def name(self) -> str:
        """The package whose code encodes."""

    @property
    def probes(self) -> tuple[str, ...]:
        """Texts that would show a fault of it."""

    def encode(self, text: str) -> UInt32 | None:
        """Ids of a text; None: the own encoder must encode it."""

    def encode_batch(self, texts: pa.Array) -> tuple[Ragged, Int64]:
        """Ids of an Arrow (large) string array without nulls, one row per text; and the rows that
        the own encoder must encode, whose ids are wrong.
        """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FastEncoder:
    """gigatoken's encoder of one vocabulary, and what has to be done around it."""

    name: str = "gigatoken"
    backend: Backend
    shift: int = 0
    """Added to every id."""
    limit: int | None = None
    """Ids from here on stand for bytes that the vocabulary lacks: a text with one is for the own
    encoder.
    """
    digits: DigitCuts | None = None
    """How texts are cut before gigatoken splits them."""
    probes: tuple[str, ...] = ()
    """Texts that would show a fault of what is done around it."""

    def encode(self, text: str) -> UInt32 | None:
        """Ids of a text; None: the own encoder must encode it."""
        if self.digits is not None:
            ids, left_out = self.encode_batch(pa.array([text], pa.large_string()))
            return None if len(left_out) else ids.values
        one = self.backend.encode(text)
        if self.limit is not None and (one >= self.limit).any():
            return None
        return one + np.uint32(self.shift)

    def encode_batch(self, texts: pa.Array) -> tuple[Ragged, Int64]:
        """Encode an Arrow (large) string array without nulls.

        Returns:
            uint32 ids and int64 offsets, one row per text; and the rows that the own encoder must
            encode, whose ids are wrong.
        """
        data, offsets = text_buffers(texts)
        rows = None
        if self.digits is not None:
            offsets, rows = self.digits.cut(data, offsets)
        encoded = self.backend.encode_batch(_as_awkward(data, offsets), parallel=False).layout
        bounds = np.asarray(encoded.offsets.data, np.int64)
        values = np.asarray(encoded.content.data, np.uint32)
        if self.shift:
            values += np.uint32(self.shift)
        ids = Ragged(values, bounds if rows is None else bounds[rows])
        if self.limit is None:
            return ids, np.empty(0, np.int64)
        places = np.flatnonzero(values >= self.limit)
        return ids, np.unique(np.searchsorted(ids.offsets, places, side="right") - 1)


def missing_gigatoken() -> str | None:
    """Why gigatoken does not load here, what that costs, and the cure; None: it loads."""
    try:
        # It is compiled: only importing it shows that it fits this machine.
        import gigatoken.gigatoken_rs  # noqa: F401
    except ImportError as error:
        return (
            f"gigatoken does not load ({error}); a byte-level tokenizer.json then encodes about "
            f"half as fast, and another vocabulary takes about {SLOWDOWN} times as long without it "
            "(measured by benchmarks/bench_tokenizers.py), with the same token ids: "
            "pip install gigatoken"
        )
    return None


def backend_from_json(content: JsonObject) -> Backend:
    """Load a scrubbed `tokenizer.json`.

    Raises:
        TokenizerError: gigatoken does not support it; the message is its reason.
    """
    from gigatoken.gigatoken_rs import load_hf_json

    return _reasoned(load_hf_json, dump_tokenizer_json(content))


def backend_from_sentencepiece(content: bytes, hidden: set[str]) -> Backend:
    """Load a SentencePiece model, without the pieces in `hidden`.

    Raises:
        TokenizerError: gigatoken does not support it; the message is its reason.
    """
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    converted = json.loads(_reasoned(sentencepiece_to_tokenizer_json, content))
    shown = [
        entry["content"] for entry in converted["added_tokens"] if entry["content"] not in hidden
    ]
    if shown:
        # It cuts the text at them and puts a space before every stretch; SentencePiece puts one
        # before the text.
        raise TokenizerError(
            f"gigatoken cannot encode it: it treats user-defined pieces differently ({shown[:3]})"
        )
    converted["added_tokens"] = []
    model = converted["model"]
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) not in hidden]
    return backend_from_json(converted)


def backend_from_ranks(content: bytes, scheme: str) -> Backend:
    """Load tiktoken ranks (a `.tiktoken` file's bytes) with one of gigatoken's named splitting
    schemes.

    Raises:
        TokenizerError: gigatoken does not support it; the message is its reason.
    """
    from gigatoken.gigatoken_rs import BPETokenizer

    descriptor, path = tempfile.mkstemp(
        suffix=".tiktoken"
    )  # gigatoken reads ranks from a file only
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return _reasoned(BPETokenizer.from_tiktoken, path, scheme)
    finally:
        os.unlink(path)


def backend_from_merged_ranks(ranks: Mapping[bytes, int], pattern: str) -> Backend:
    """Load ranks as an equivalent `tokenizer.json`: every way to make a token of two others is a
    merge.

    For vocabularies such as Llama 3's, which have tokens that no merge makes: with `ignore_merges`
    such a token is used if it is a whole piece of text, as in tiktoken. Loading takes 3 s for
    128,000 ranks.

    Raises:
        TokenizerError: gigatoken does not support it; the message is its reason.
    """
    vocabulary, merges = {}, []
    for token, rank in sorted(ranks.items(), key=lambda pair: pair[1]):
        text = spell_as_characters(token)
        vocabulary[text] = rank
        cuts = [(token[:at], token[at:], at) for at in range(1, len(token))]
        ways = sorted(
            (ranks[left], ranks[right], at)
            for left, right, at in cuts
            if left in ranks and right in ranks
        )
        merges += [[text[:at], text[at:]] for _, _, at in ways]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    made = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "decoder": level,
        "model": {"type": "BPE", "ignore_merges": True, "vocab": vocabulary, "merges": merges},
    }
    return backend_from_json(made)


def text_buffers(texts: pa.Array) -> tuple[Bytes, Int64]:
    """The bytes of an Arrow string array and where each text begins; only 32-bit offsets are
    copied, widened.
    """
    _, offset_buffer, data_buffer = texts.buffers()
    offsets: Array
    offset_dtype = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    if offset_buffer is None or not len(texts):
        offsets = np.zeros(len(texts) + 1, np.int64)
    else:
        offsets = np.frombuffer(offset_buffer, offset_dtype)[
            texts.offset : texts.offset + len(texts) + 1
        ]
    data = np.empty(0, np.uint8) if data_buffer is None else np.frombuffer(data_buffer, np.uint8)
    return data, offsets.astype(np.int64, copy=False)


def _as_awkward(data: Bytes, offsets: Int64) -> "awkward.Array":
    """The same buffers as an awkward array of strings."""
    import awkward as ak

    characters = ak.contents.NumpyArray(data, parameters={"__array__": "char"})
    return ak.Array(
        ak.contents.ListOffsetArray(
            ak.index.Index64(offsets), characters, parameters={"__array__": "string"}
        )
    )


def _reasoned(load: Callable[..., T], *arguments: object) -> T:
    """Call gigatoken; its errors become ours, in one line."""
    try:
        return load(*arguments)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).split("\n")[0]
        raise TokenizerError(f"gigatoken cannot encode it: {reason}") from error
