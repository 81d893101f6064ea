"""Reads Megatron's `.bin` and `.idx` in place.

The index begins with a magic number of 9 bytes, a version (uint64, 1), the code of the token type
(uint8), the number of sequences and the number of document borders (uint64 each). Then come lengths
of sequences (int32, in tokens), positions of sequences in the `.bin` (int64, in bytes), and borders
of documents (int64, in sequences, from 0 to the number of sequences). Multimodal data also have
modes of sequences (int8), which are refused. Source: `megatron/core/datasets/indexed_dataset.py` of
megatron-core 0.16.

Opening reads the index once and keeps 4 bytes per document (the lengths, because their address in
the file is not a multiple of 4), or 12 bytes if documents consist of several sequences.
"""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import CorruptionError, FormatError
from penstock.core.folders import local_path
from penstock.core.system import limit_cure
from penstock.data.shards.foreign.in_place import InPlaceCorpus, in_place_table, sample_checksum
from penstock.data.shards.format import _check_kernels as check
from penstock.data.stores.files import checksum, map_file, unreadable

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
"""Code → type of tokens."""
READABLE = {"uint16": 2, "int16": 2, "int32": 4}
"""Supported type → bytes per token."""

_SAMPLED_ENDS = 256


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronIndex:
    """The content of an `.idx` file."""

    path: Path
    token_type: str
    lengths: Array
    """int32 [sequences], at any address."""
    pointers: Array
    """int64 [sequences], at any address."""
    borders: Array
    """int64 [documents + 1], at any address."""

    @classmethod
    def read(cls, path: Path) -> "MegatronIndex":
        """Map an index.

        Raises:
            FormatError: It is missing, not an index, of another version, multimodal, or of another
                type.
            CorruptionError: It is cut short.
        """
        data = _map(path)
        if len(data) < HEADER.size or data[: len(MAGIC)].tobytes() != MAGIC:
            raise FormatError(f"{path}: not a Megatron index: it does not begin with {MAGIC!r}")
        _, version, code, sequences, borders = HEADER.unpack(data[: HEADER.size].tobytes())
        if version != 1:
            raise FormatError(f"{path}: version {version} of the Megatron index; known: 1")
        token_type = TYPES.get(code, f"of code {code}")
        if token_type not in READABLE:
            raise FormatError(f"{path}: tokens are {token_type}; readable: {', '.join(READABLE)}")
        size = HEADER.size + 12 * sequences + 8 * borders
        if len(data) == size + sequences > size:
            raise FormatError(
                f"{path}: multimodal (it has a mode for each sequence); only text can be read"
            )
        if len(data) != size or borders < 1:
            raise CorruptionError(
                f"{path}: {len(data)} bytes, expected {size} for {sequences} sequences and "
                f"{borders} borders of documents; copy it again"
            )
        edges = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * borders])
        parts = (
            data[a:b].view(kind)
            for a, b, kind in zip(edges, edges[1:], ("<i4", "<i8", "<i8"), strict=False)
        )
        lengths, pointers, starts = parts
        return cls(
            path=path, token_type=token_type, lengths=lengths, pointers=pointers, borders=starts
        )

    def check(self, num_bytes: int) -> None:
        """Check the whole index against a `.bin` of `num_bytes`.

        Raises:
            CorruptionError: A sequence or a document is not where it should be.
        """
        size = READABLE[self.token_type]
        sequence, border = check.check_sequences(
            self.lengths, self.pointers, self.borders, size, num_bytes
        )
        if sequence >= 0:
            raise CorruptionError(
                f"{self.path}: sequence {sequence} of {self.lengths[sequence]} tokens at byte "
                f"{self.pointers[sequence]}: does not follow the one before, or leaves the "
                f".bin of {num_bytes} bytes"
            )
        if border >= 0:
            raise CorruptionError(
                f"{self.path}: border {border} of documents is {self.borders[border]}; "
                f"borders must increase from 0 to {len(self.lengths)}, the number of sequences"
            )


def open_megatron(prefix: str | Path, eos_id: int | None = None) -> InPlaceCorpus:
    """Open `prefix.bin` and `prefix.idx` without copying the tokens.

    Args:
        prefix: Path without its ending; `.bin` or `.idx` is accepted too.
        eos_id: The token that ends every document (append-eod), which the format does not record.
            Objectives then keep it at the end; without it, it is a token like any other. Checked on
            a sample of the documents.

    Raises:
        FormatError: Not such a corpus, or of an unsupported kind, or a document does not end with
            `eos_id`.
        CorruptionError: The files do not match each other, or are cut short.
    """
    prefix = megatron_prefix(local_path(prefix, "a Megatron corpus"))
    index = MegatronIndex.read(prefix.with_name(prefix.name + ".idx"))
    path = prefix.with_name(prefix.name + ".bin")
    data = _map(path)
    index.check(len(data))
    lengths, offsets = _documents(index)
    if len(lengths) and int(lengths.max()) >= 2**32:
        raise FormatError(f"{index.path}: a document of {lengths.max()} tokens; at most 2^32 - 1")
    table = in_place_table(
        [path],
        [data],
        [offsets],
        lengths.astype(np.uint32).reshape(-1, 1),
        [len(lengths)],
        token_bytes=READABLE[index.token_type],
        offset_bytes=1,
    )
    content = (
        index.token_type,
        len(data),
        *(checksum(part) for part in (lengths, offsets)),
        sample_checksum(data),
    )
    fingerprint = hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()
    corpus = InPlaceCorpus(
        "Megatron",
        prefix.name,
        table,
        fingerprint,
        (open_megatron, (prefix, eos_id)),
        ends_with_eos=eos_id is not None,
    )
    if eos_id is not None:
        _check_ends(corpus, eos_id)
    return corpus


def _check_ends(corpus: InPlaceCorpus, eos_id: int) -> None:
    """Check the ends of at most `_SAMPLED_ENDS` documents, spread evenly."""
    for document in np.unique(
        np.linspace(0, len(corpus) - 1, min(len(corpus), _SAMPLED_ENDS), dtype=np.int64)
    ).tolist():
        tokens = corpus[document].tokens
        if len(tokens) and int(tokens[-1]) != eos_id:
            raise FormatError(
                f"{corpus.path}: document {document} ends with token {int(tokens[-1])}, not "
                f"with eos_id {eos_id}; leave eos_id out, or give the right one"
            )


def megatron_prefix(path: str | Path) -> Path:
    """A path without `.bin` or `.idx`."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def _documents(index: MegatronIndex) -> tuple[Array, Array]:
    """Length of each document in tokens, and where it begins in the `.bin` (int64, in bytes)."""
    if check.one_sequence_each(index.borders):
        return index.lengths, index.pointers
    sums = np.empty(len(index.borders) - 1, np.int64)
    check.document_sums(index.lengths, index.borders, sums)
    ends = np.cumsum(sums * READABLE[index.token_type])
    return sums, np.concatenate([np.zeros(1, np.int64), ends])


def _map(path: Path) -> Any:
    try:
        return map_file(path)
    except OSError as error:
        if limit_cure(error):
            raise unreadable(path, error) from None
        raise FormatError(
            f"{path}: cannot read: {error.strerror or error}; a Megatron corpus is a .bin and "
            "an .idx"
        ) from None
