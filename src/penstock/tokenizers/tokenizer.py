"""A tokenizer: text to ids and back, ids to bytes, for every format of vocabulary.

Guarantees: encoding never adds BOS or EOS, and text becomes a control token only with
`allow_control`. The ids are those of the vocabulary's own package; `check_encoder` compares, and
switches to that package if they differ. Costs: opening parses the vocabulary (0.05 to 0.3 s);
encoders and the byte table are built on first use.
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa

from penstock.core.arrays import Array, UInt32
from penstock.core.arrow import from_texts
from penstock.core.errors import OutputError, TokenizerError
from penstock.core.folders import local_path
from penstock.core.json_values import JsonObject
from penstock.core.lazy_imports import require
from penstock.core.notebook import card
from penstock.core.ragged import Ragged
from penstock.core.system import without_collector, writing_cure
from penstock.tokenizers.byte_table import ByteTable, IntArray
from penstock.tokenizers.chat_templates import CHAT_TEMPLATE, template_in
from penstock.tokenizers.fast import Encoder, missing_gigatoken
from penstock.tokenizers.huggingface import HuggingFaceVocabulary
from penstock.tokenizers.post_processors import before_a_text, with_bos, without_bos
from penstock.tokenizers.ranks import RankVocabulary
from penstock.tokenizers.sentencepiece_model import SentencePieceVocabulary
from penstock.tokenizers.shown_tokens import ShownTokens, show_tokens
from penstock.tokenizers.token_ends import token_ends
from penstock.tokenizers.vocabulary import AddedEntry, Vocabulary

CONFIG = "tokenizer_config.json"
FALLBACK_TEXTS = 1000
"""Texts per call of an encoder that makes Python lists; bounds its memory."""

_SHOWN_SPECIAL = 12
"""Special tokens that a notebook shows."""


@final
class Tokenizer:
    """One vocabulary, ready to encode; make it with `load_tokenizer` or `train_tokenizer`.

    Immutable with one exception: `check_encoder` may switch from the fast encoder to the
    vocabulary's own. A pickle holds the bytes of the vocabulary, its chat template and that switch,
    so worker processes need no files and use the same encoder.

    Attributes:
        name: Short name of its file, folder or repository.
        kind: "byte-level BPE", "SentencePiece BPE", "Unigram", "WordPiece", "tiktoken" or "tekken".
        vocab_size: One more than the highest id.
        bos_id: Id of the begin of text, or None.
        eos_id: Id of the end of text, or None.
        pad_id: Id of padding, or None.
        special_tokens: All control entries, text → id, including those that their file does not
            mark special.
        unknown_id: Id of text that the vocabulary cannot spell, or None.
        normalization: What is done to text before it is encoded: None; "NFC", and then `token_ends`
            needs text in that form; or a lossy form, and then there is no byte table.
        adds_space: Whether a space is put before the text.
        begin_ids: The ids that the tokenizer's own package puts before a text: its BOS, or none. It
            may name a BOS and add none, as SmolLM2's does.
    """

    def __init__(
        self,
        name: str,
        files: Mapping[str, bytes],
        *,
        fallback_reason: str | None = None,
        parsed: JsonObject | None = None,
    ) -> None:
        """Open a vocabulary.

        Args:
            name: Short name of its file, folder or repository.
            files: Canonical name → contents, as in `source_bytes`.
            fallback_reason: Why no fast encoder must encode.
            parsed: What the tokenizer.json in `files` holds, if it has been parsed; taken over.
        """
        self.name = name
        self.source_bytes = dict(files)
        self._vocabulary = _open_vocabulary(self.source_bytes, parsed)
        require(self._vocabulary.own_encoder)
        self._fallback_reason = fallback_reason
        self.kind = self._vocabulary.kind
        self.vocab_size = self._vocabulary.size
        self.bos_id = self._vocabulary.bos_id
        self.eos_id = self._vocabulary.eos_id
        self.pad_id = self._vocabulary.pad_id
        self.special_tokens = dict(self._vocabulary.controls)
        self.normalization = self._vocabulary.normalization
        self.unknown_id = self._vocabulary.unknown_id
        self.adds_space = self._vocabulary.adds_space
        bos = self._vocabulary.bos_id if self._vocabulary.adds_bos else None
        self.begin_ids: tuple[int, ...] = () if bos is None else (bos,)

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, {self.kind}, {self.vocab_size} ids)"

    def _repr_html_(self) -> str:
        """What a notebook shows: its kind, its ids, and whether it brings a chat template."""
        ids = [("BOS", self.bos_id), ("EOS", self.eos_id), ("padding", self.pad_id)]
        special = sorted(self.special_tokens.items(), key=lambda entry: entry[1])
        names = ", ".join(f"{text} {number}" for text, number in special[:_SHOWN_SPECIAL])
        more = (
            f" and {len(special) - _SHOWN_SPECIAL:,} more" if len(special) > _SHOWN_SPECIAL else ""
        )
        facts = [
            ("kind", self.kind),
            ("ids", f"{self.vocab_size:,}"),
            *((name, number) for name, number in ids if number is not None),
            ("special tokens", (names or "none") + more),
            ("chat template", "yes" if self.chat_template else "no"),
            ("encoder", self.encoder),
        ]
        return card(f"Tokenizer {self.name}", facts)

    def __reduce__(self) -> tuple[Callable[..., "Tokenizer"], tuple[object, ...]]:
        return _rebuild, (self.name, self.source_bytes, self._fallback_reason)

    @cached_property
    @without_collector()
    def fingerprint(self) -> str:
        """Hex digest of everything that affects ids; the same for a file, its .gz, and a copy under
        another name.
        """
        digest = hashlib.blake2b(digest_size=16)
        for part in self._vocabulary.identity():
            digest.update(part)
        return digest.hexdigest()

    @cached_property
    def chat_template(self) -> str | None:
        """The chat template that came with the vocabulary, as text; None: there was none."""
        own = self.source_bytes.get(CHAT_TEMPLATE)
        if own is None:
            return template_in(json.loads(self.source_bytes.get(CONFIG, b"{}")))
        return io.StringIO(own.decode(), newline=None).read()

    @property
    def encoder(self) -> str:
        """The package whose code encodes: "gigatoken"; "penstock", which cuts text into pieces and
        keeps their ids; or the vocabulary's own "tokenizers", "tiktoken" or "sentencepiece".
        """
        return self._vocabulary.own_encoder if self._fast is None else self._fast.name

    @property
    def fallback_reason(self) -> str | None:
        """Why no fast encoder, gigatoken or penstock, encodes; None when one does."""
        return None if self._fast is not None else self._fallback_reason

    def encode(self, text: str, *, allow_control: bool = False) -> UInt32:
        """Ids of one text, uint32 [tokens], without BOS and EOS.

        Args:
            text: Any text.
            allow_control: Turn control entries in the text into control tokens; without it they
                stay text.

        Raises:
            TokenizerError: The text holds a lone surrogate, which has no bytes.
        """
        check_encodable(text)
        if self._fast is not None and not allow_control:
            ids = self._fast.encode(text)
            if ids is not None:
                return ids
        return np.array(self._vocabulary.encode(text, allow_control=allow_control), np.uint32)

    def show(self, text: str, *, allow_control: bool = False) -> ShownTokens:
        """The tokens of a text with what each stands for: lines of text, and colours in a notebook.

        Args:
            text: As for `encode`; likewise `allow_control`.
        """
        names = {number: name for name, number in self.special_tokens.items()}
        ids = self.encode(text, allow_control=allow_control)
        return show_tokens(ids, self.rough_byte_table, names)

    def encode_each(self, texts: Iterable[str]) -> Ragged:
        """Ids of a few texts, one row each, as `encode`."""
        return Ragged.from_rows([self.encode(text) for text in texts], np.uint32)

    def encode_batch(self, texts: object) -> Ragged:
        """Ids of many texts: the fast path.

        Args:
            texts: A pyarrow string or large_string array without nulls; its buffers are used as
                they are.

        Returns:
            uint32 ids and int64 offsets, one row per text.

        Raises:
            TokenizerError: `texts` contains nulls, or is not an array of strings.
        """
        array = _checked_array(texts)
        if self._fast is None:
            return self._encode_slowly(array)
        ids, left_out = self._fast.encode_batch(array)
        if not len(left_out):
            return ids
        return _with_rows(ids, left_out, self._encode_slowly(array.take(pa.array(left_out))))

    @property
    def cuts(self) -> tuple[AddedEntry, ...] | None:
        """The entries at which encoding with `allow_control` first cuts a text, leftmost and then
        longest.

        Each stretch between them is encoded as a separate text; None: the vocabulary does something
        else.
        """
        return self._vocabulary.cuts

    @cached_property
    def inner(self) -> "Tokenizer":
        """The tokenizer for stretches that do not begin their text.

        Itself, unless it puts a space before the text only (Metaspace with `prepend_scheme`
        "first"): then a copy that does not.
        """
        files = self._vocabulary.inner_files(self.source_bytes)
        return (
            self
            if files is None
            else Tokenizer(self.name, files, fallback_reason=self._fallback_reason)
        )

    def encode_with_positions(
        self, text: str, *, allow_control: bool = False
    ) -> tuple[IntArray, IntArray]:
        """Ids by the vocabulary's own encoder, int64 [tokens], and where each is, in characters,
        int64 [tokens, 2].

        Raises:
            TokenizerError: That encoder gives no positions; or the text holds a lone surrogate.
        """
        check_encodable(text)
        ids, positions = self._vocabulary.encode_with_positions(text, allow_control=allow_control)
        return np.array(ids, np.int64), np.array(positions, np.int64).reshape(-1, 2)

    def encode_disguised(
        self, text: str, controls: Sequence[tuple[int, int, str]]
    ) -> tuple[IntArray, IntArray]:
        """Like `encode_with_positions`, but exactly `controls` (begin, end, control text) become
        control tokens.

        For vocabularies without `cuts`.
        """
        check_encodable(text)
        ids, positions = self._vocabulary.encode_disguised(text, controls)
        return np.array(ids, np.int64), np.array(positions, np.int64).reshape(-1, 2)

    def check_encoder(self, sample: Sequence[str]) -> str | None:
        """Compare the fast encoder with the vocabulary's own on `sample`; if they differ, switch to
        the own one.

        Returns:
            The reason for the switch, to be reported; None if there was none.
        """
        if self._fast is None:
            return None
        fast_name, sample = self._fast.name, [*sample, *self._fast.probes]
        texts = from_texts(sample)
        own_encoder = self._vocabulary.sample_encoder(sample)
        fast, own = self.encode_batch(texts), self._encode_slowly(texts, own_encoder)
        if np.array_equal(fast.offsets, own.offsets) and np.array_equal(fast.values, own.values):
            return None
        row, text = next(
            (row, text)
            for row, text in enumerate(sample)
            if not np.array_equal(fast[row], own[row])
        )
        place = _first_difference(fast[row], own[row])
        shown = text if len(text) <= 60 else text[:60] + "…"
        self._fallback_reason = (
            f"{fast_name} and {self._vocabulary.own_encoder} disagree on {shown!r}, "
            f"from token {place} on: {fast[row][place : place + 4].tolist()} against "
            f"{own[row][place : place + 4].tolist()}"
        )
        del self._fast
        return self._fallback_reason

    def decode(self, ids: object) -> str:
        """Text of `ids`; control tokens appear as in their file, broken UTF-8 as U+FFFD.

        A tokenizer that puts a space before the text (SentencePiece's dummy prefix) decodes without
        the first space, as its own package does, even if that space was part of the text.
        """
        try:
            table = self.byte_table
        except TokenizerError:
            return self._vocabulary.decode(np.asarray(ids, np.int64).tolist())
        ids = table.check(ids)
        names = {token_id: text.encode() for text, token_id in self.special_tokens.items()}
        if not table.is_control[ids].any():
            spelled = table.spell(ids).tobytes()
        else:
            spelled = b"".join(names.get(token_id) or table[token_id] for token_id in ids.tolist())
        return self._without_prefix(spelled).decode(errors="replace")

    @cached_property
    def byte_table(self) -> ByteTable:
        """id → bytes.

        Raises:
            TokenizerError: This vocabulary has no exact table; the message says why.
        """
        return self._vocabulary.build_byte_table(exact=True)

    @cached_property
    def rough_byte_table(self) -> ByteTable:
        """id → its string, to compare tokens of vocabularies without an exact table.

        Whitespace, case and accents that the vocabulary drops are missing; a token that begins a
        word begins with a space.
        """
        return self._vocabulary.build_byte_table(exact=False)

    def beginning_with(self, begin_ids: Sequence[int]) -> "Tokenizer":
        """This tokenizer, or a copy of it whose own encoding puts BOS, or nothing, before a text.

        Ids do not change. Formats that cannot say it (tekken, tiktoken) stay as they are.

        Args:
            begin_ids: BOS, or empty.
        """
        files, wanted = dict(self.source_bytes), bool(begin_ids)
        if "tokenizer.json" in files:
            content = json.loads(files["tokenizer.json"])
            processor = content.get("post_processor")
            says = processor is not None and self.bos_id in before_a_text(processor)
            if says == wanted == bool(self.begin_ids) or self.bos_id is None:
                return self
            names = {token_id: text for text, token_id in self.special_tokens.items()}
            bos, name = self.bos_id, names[self.bos_id]
            changed = (
                with_bos(processor, name, bos)
                if wanted and not says
                else without_bos(processor, bos)
            )
            files["tokenizer.json"] = json.dumps(
                {**content, "post_processor": changed}, ensure_ascii=False
            ).encode()
        elif "tokenizer.model" in files and wanted != bool(self.begin_ids):
            config = json.loads(files.get(CONFIG, b"{}"))
            files[CONFIG] = json.dumps({**config, "add_bos_token": wanted}, indent=2).encode()
        else:
            return self
        return Tokenizer(self.name, files, fallback_reason=self._fallback_reason)

    def token_ends(self, text: str | bytes, ids: object) -> IntArray:
        """Byte position in `text` (UTF-8) after each token, int64 [tokens]; control tokens take no
        bytes.

        Raises:
            TokenizerError: The bytes of `ids` differ from those of `text` by more than a space
                before it; or there is no byte table.
        """
        check_encodable(text)
        data = np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)
        ids = np.asarray(ids, np.int64)
        whole = Ragged(data, np.array([0, len(data)], np.int64))
        return token_ends(
            self.byte_table, whole, Ragged(ids, np.array([0, len(ids)], np.int64))
        ).values

    def token_ends_batch(self, texts: Any, ids: Ragged) -> Ragged:
        """`token_ends` of many texts at once: an Arrow string array and the ids of each; int64,
        offsets of `ids`.
        """
        texts = _checked_array(texts).cast(pa.large_string())
        _, offset_buffer, data_buffer = texts.buffers()
        offsets = (
            np.frombuffer(offset_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
            if len(texts)
            else np.zeros(1, np.int64)
        )
        data = (
            np.frombuffer(data_buffer, np.uint8)
            if data_buffer is not None
            else np.empty(0, np.uint8)
        )
        return token_ends(self.byte_table, Ragged(data, offsets), ids)

    def save(self, output: str | Path) -> None:
        """Write the vocabulary's files; `load_tokenizer(folder)` reads them, and transformers a
        tokenizer.json.

        Raises:
            OutputError: The folder cannot be written.
            ConfigError: It is a URL.
        """
        output = local_path(output, "a tokenizer's folder")
        try:
            output.mkdir(parents=True, exist_ok=True)
            for name, content in self.source_bytes.items():
                (output / name).write_bytes(content)
        except OSError as error:
            raise OutputError(
                f"{output}: cannot save the tokenizer there: {error}; {writing_cure(error)}"
            ) from error

    @cached_property
    def _fast(self) -> Encoder | None:
        """The fast encoder; None if there is none, or it must not encode."""
        if self._fallback_reason is not None:
            return None
        try:
            return self._vocabulary.build_fast(missing_gigatoken())
        except TokenizerError as error:
            self._fallback_reason = str(error)
            return None

    def _encode_slowly(
        self, texts: pa.Array, encode: Callable[[Sequence[str]], list[list[int]]] | None = None
    ) -> Ragged:
        encode = encode or self._vocabulary.encode_batch
        rows: list[Any] = []
        for begin in range(0, len(texts), FALLBACK_TEXTS):
            encoded = encode(texts.slice(begin, FALLBACK_TEXTS).to_pylist())
            rows += [np.array(ids, np.uint32) for ids in encoded]
        return Ragged.from_rows(rows, np.uint32)

    def _without_prefix(self, spelled: bytes) -> bytes:
        return spelled[1:] if self.adds_space and spelled.startswith(b" ") else spelled


def _open_vocabulary(files: Mapping[str, bytes], parsed: JsonObject | None) -> Vocabulary:
    """The vocabulary in `files`; their canonical names give its format."""
    if "tokenizer.json" in files:
        return HuggingFaceVocabulary(files["tokenizer.json"], files.get(CONFIG), parsed=parsed)
    if "tekken.json" in files:
        return RankVocabulary.from_tekken(files["tekken.json"])
    if "tokenizer.model" in files:
        return SentencePieceVocabulary(files["tokenizer.model"], files.get(CONFIG))
    return RankVocabulary.from_tiktoken(files["tokenizer.tiktoken"], files["encoding.json"])


def _rebuild(name: str, files: dict[str, bytes], fallback_reason: str | None) -> Tokenizer:
    return Tokenizer(name, files, fallback_reason=fallback_reason)


def _checked_array(texts: object) -> pa.Array:
    """`texts` as one Arrow array of strings without nulls."""
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    if not isinstance(texts, pa.Array) or not (
        pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)
    ):
        found = texts.type if isinstance(texts, pa.Array) else type(texts).__name__
        raise TokenizerError(
            f"texts are {found}, expected: a pyarrow array of strings; use pyarrow.array(texts)"
        )
    if texts.null_count:
        raise TokenizerError(
            f"{texts.null_count} of {len(texts)} texts are null; drop them, or make them empty"
        )
    return texts


def check_encodable(text: str | bytes) -> None:
    """Raise TokenizerError if the text holds a lone surrogate, which has no bytes."""
    try:
        _ = text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"character {error.start} of the text is U+{ord(error.object[error.start]):04X}, "
            "half of a surrogate pair, which has no bytes; repair the text, for example "
            "text.encode('utf-16', 'surrogatepass').decode('utf-16')"
        ) from error


def _with_rows(ragged: Ragged, rows: IntArray, new: Ragged) -> Ragged:
    """A copy with some rows, in ascending order, replaced."""
    lengths = ragged.lengths
    lengths[rows] = new.lengths
    kept = np.split(ragged.values, ragged.offsets[np.stack([rows, rows + 1], 1).ravel()])[::2]
    parts = [kept[0], *(part for pair in zip(new, kept[1:], strict=True) for part in pair)]
    return Ragged(np.concatenate(parts), np.concatenate(([0], np.cumsum(lengths))))


def _first_difference(left: Array, right: Array) -> int:
    shorter = min(len(left), len(right))
    different = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(different[0]) if len(different) else shorter
