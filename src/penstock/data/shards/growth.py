"""Whether a dataset has grown: the fingerprint of its first documents, to compare with that of the
smaller one.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from penstock.core.arrays import Array
from penstock.data.shards.dataset import Dataset
from penstock.data.shards.joined import JoinedCorpus, fingerprint_of_parts
from penstock.data.shards.tables.corpus import Corpus
from penstock.data.shards.writing.finish import content_fingerprint, fingerprint_pieces


def prefix_fingerprint(corpus: Corpus, documents: int) -> str | None:
    """The fingerprint that a corpus of its first `documents` documents would have; reads their
    checksums.

    Returns:
        None where it cannot be known: a dataset in a store, or of a foreign format, is compared as
        a whole, or as a whole part of several that are joined.
    """
    if not 0 < documents <= len(corpus):
        return None
    if not isinstance(corpus, JoinedCorpus):
        return _of_dataset(corpus, documents)
    prints = []
    for part in corpus.parts:
        found = _of_dataset(part, min(documents, len(part)))
        if found is None:
            return None
        prints.append(found)
        documents -= min(documents, len(part))
        if not documents:
            break
    return prints[0] if len(prints) == 1 else fingerprint_of_parts(prints)


def _of_dataset(corpus: Corpus, documents: int) -> str | None:
    if documents == len(corpus):
        return corpus.fingerprint
    if not isinstance(corpus, Dataset) or corpus.table.holder is not None:
        return None
    layout, table = corpus.manifest.layout, corpus.table

    def shards() -> Iterator[tuple[Iterable[tuple[int, Any]], Array]]:
        for i, data in enumerate(table.mappings[: len(table.shard_starts) - 1]):
            begin, end = int(table.shard_starts[i]), int(table.shard_starts[i + 1])
            batches = table.batches[table.shard_first_batch[i] : table.shard_first_batch[i + 1]]
            lengths = np.asarray(table.lengths[begin:end])
            count = min(documents, end) - begin
            if count > 0:
                yield (
                    fingerprint_pieces(data, batches, lengths, layout, first=count),
                    lengths[:count],
                )

    return content_fingerprint(shards(), layout)
