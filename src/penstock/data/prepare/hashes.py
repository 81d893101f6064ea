"""Hashes of a part's documents, written next to it, so that duplicates can be found when all parts
are there.
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import final

import numpy as np

from penstock.core.arrays import Array
from penstock.data.prepare.documents import Documents
from penstock.data.shards import ShardLayout
from penstock.data.shards.format.trees import tree_words
from penstock.data.stores.files import checksum, write_file

HASH = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<u4"), ("text_bytes", "<u4")])
"""Of a document: its hash, its number in its part (those of the first split come first), and its
UTF-8 bytes.
"""


@final
class HashFile:
    """Collects the hashes of one part's documents.

    Args:
        layout: The layout of the shards.
        splits: Names of the splits.
    """

    def __init__(self, layout: ShardLayout, splits: Sequence[str]) -> None:
        self._layout = layout
        self._digests: dict[str, list[bytes]] = {split: [] for split in splits}
        self._sizes: dict[str, list[Array]] = {split: [] for split in splits}

    def add(self, split: str, documents: Documents) -> None:
        """Hash some documents."""
        tokens = np.ascontiguousarray(documents.tokens.values, self._layout.token_dtype)
        data, item = tokens.view(np.uint8).data, tokens.itemsize
        extras = _extras(documents) if self._layout.has_trees or self._layout.has_images else None
        ends = (documents.tokens.offsets * item).tolist()
        for row, (begin, end) in enumerate(pairwise(ends)):
            found = hashlib.blake2b(data[begin:end], digest_size=16)
            if extras is not None and extras[row]:
                found.update(extras[row])
            self._digests[split].append(found.digest())
        self._sizes[split].append(documents.text_sizes)

    def finish(self, path: Path) -> tuple[dict[str, int], int]:
        """Write them sorted; returns the number of documents of each split, and the checksum of the
        file.
        """
        counts = {split: len(digests) for split, digests in self._digests.items()}
        digests = [digest for split in self._digests.values() for digest in split]
        rows = np.zeros(len(digests), HASH)
        words = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
        rows["high"], rows["low"] = words.T
        rows["document"] = np.arange(len(rows))
        sizes = [one for split in self._sizes.values() for one in split]
        rows["text_bytes"] = np.concatenate(sizes) if sizes else 0
        rows = rows[np.lexsort((rows["low"], rows["high"]))]
        write_file(path, rows.view(np.uint8))
        return counts, checksum(rows.view(np.uint8))


def _extras(documents: Documents) -> list[bytes]:
    """What else makes documents different: trees, and which images stand where."""
    lengths = documents.tokens.lengths.tolist()
    trees = tree_words(documents.trees or [None] * len(lengths), lengths)
    images = documents.images or [[] for _ in lengths]
    return [
        words.tobytes() + b"".join(f"{one.begin} ".encode() + one.digest for one in of_document)
        for words, of_document in zip(trees, images, strict=True)
    ]


def copy_hashes(source: Path, first: int, count: int, sum_of_bytes: int, target: Path) -> bool:
    """Copy `count` hashes from number `first` on; False if they are missing or differ from their
    checksum.
    """
    try:
        with open(source, "rb") as file:
            file.seek(first * HASH.itemsize)
            data = np.frombuffer(file.read(count * HASH.itemsize), np.uint8)
    except OSError:
        return False
    if len(data) != count * HASH.itemsize or checksum(data) != sum_of_bytes:
        return False
    write_file(target, data)
    return True
