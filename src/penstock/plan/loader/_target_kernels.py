"""Compiled search for targets: which stretches of documents have a loss weight; leaves out entries
that have none.
"""

import numpy as np

from penstock.core.compiled import bare, inline_kernel, kernel
from penstock.data.shards.format._kernels import OK
from penstock.plan.loader._document_kernels import read_spans, sources_of
from penstock.plan.sampling._kernels import add_skipped, clear_skipped

UNTRAINED = np.dtype(
    [
        ("documents", np.int64),  # documents of which nothing is left
        ("parts", np.int64),  # parts that were left out, those of such documents among them
        (
            "tokens",
            np.int64,
        ),  # tokens of these parts; of a document that was truncated, all its tokens
    ],
    align=True,
)
"""What was left out of a source between two documents, or since its beginning, because it has no
target.
"""


@inline_kernel
def add_untrained(total, part):
    """Add the counts of `part` to those of `total` (records `UNTRAINED`)."""
    total.documents += part.documents
    total.parts += part.parts
    total.tokens += part.tokens


@inline_kernel
def clear_untrained(counts):
    """Set all counts of a record `UNTRAINED` to 0."""
    counts.documents = 0
    counts.parts = 0
    counts.tokens = 0


@inline_kernel
def _has_weight(first, stop, number, begins, ends, values):
    """Whether a document has a loss weight other than 0 among its tokens [first, stop); `number`
    −1: all are 1.
    """
    if number < 0:
        return first < stop
    for span in range(number):
        begin, end = max(np.int64(begins[span]), first), min(np.int64(ends[span]), stop)
        if begin < end and values[span] != np.float32(0.0):
            return True
    return False


@kernel
def find_weights(sources, documents, firsts, stops, found):
    """Find out which stretches [first, stop) of documents of one source with spans have a loss
    weight other than 0.

    Args:
        sources: uint64, the bytes of its `SOURCE_RECORD`.
        documents: int64 [n], numbers of the documents.
        firsts, stops: int64 [n].
        found: bool [n], written.

    Returns:
        (fault or OK, index of the document in which it is or −1).
    """
    source = sources_of(sources)[0]
    for i in range(len(documents)):
        status, number, begins, ends, values = read_spans(source, documents[i])
        if status != OK:
            return status, i
        found[i] = _has_weight(firsts[i], stops[i], number, begins, ends, values)
    return OK, -1


@kernel
def leave_out(entries, untrained, kept, truncated, last):
    """Leave entries of a buffer out, and count them in the entry after each; returns how many are
    left.

    Args:
        entries: `ENTRY` [n + 1]; the last one counts what was skipped at the end. Those that stay
            are moved forward.
        untrained: `UNTRAINED` [n + 1], written: what was left out before each entry. The first one
            is added to.
        kept: bool [n], whether an entry stays.
        truncated: int64 [n], tokens that were cut off an entry's document; they no longer count as
            cut off where the entry is left out.
        last: bool [n], whether nothing of its document is left without an entry.
    """
    entries, untrained = bare(entries), bare(untrained)
    at = 0
    for i in range(len(kept)):
        if kept[i]:
            if at < i:
                # What was skipped before it is in its new place already.
                untouched, entry = entries[at], entries[i]
                untouched.position = entry.position
                untouched.document = entry.document
                untouched.begin = entry.begin
                untouched.tokens = entry.tokens
                untouched.total = entry.total
                untouched.length = entry.length
                clear_skipped(entries[at + 1].skipped)
                add_skipped(entries[at + 1].skipped, entries[i + 1].skipped)
            at += 1
            clear_untrained(untrained[at])
        else:
            entries[at].skipped.truncated_tokens -= truncated[i]
            add_skipped(entries[at].skipped, entries[i + 1].skipped)
            untrained[at].documents += last[i]
            untrained[at].parts += 1
            untrained[at].tokens += entries[i].tokens + truncated[i]
    return at
