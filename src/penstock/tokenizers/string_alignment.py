"""Alignment for a tokenizer without a byte table: by the strings of its tokens.

Both sides are walked as bytes, without whitespace, case and accents. Where they differ (an unknown
word, a lossy normaliser), dynamic programming matches tokens between the places that agree. None of
this proves that bytes are equal, so chunks are EQUIVALENT at best. Costs: those of the walk, and up
to 10 ms per stretch that differs.
"""

import numpy as np

from penstock.tokenizers._alignment_kernels import DIFFERENT, EQUIVALENT, EXACT
from penstock.tokenizers._string_kernels import CELLS, match_tokens
from penstock.tokenizers.alignment_forms import canonicalise
from penstock.tokenizers.alignment_sides import Chunks, Side, walk
from penstock.tokenizers.byte_table import IntArray


def align_strings(student: Side, teacher: Side) -> Chunks:
    """Chunks that look equal, EQUIVALENT; control tokens; and what lies between, DIFFERENT."""
    student, teacher = canonicalise(student), canonicalise(teacher)
    chunks = walk(student, teacher, resume=True)
    assert chunks is not None  # with `resume` it never stops early
    chunks.kinds[chunks.kinds == EXACT] = EQUIVALENT
    different = np.flatnonzero(chunks.kinds == DIFFERENT)
    if not len(different):
        return chunks
    rows = np.column_stack([chunks.student_bounds, chunks.teacher_bounds]).astype(np.int64)
    kept = np.column_stack([rows, chunks.kinds])[chunks.kinds != DIFFERENT]
    matched = [_match(student, teacher, rows[chunk]) for chunk in different]
    whole = np.concatenate([kept, *matched])
    whole = whole[np.argsort(whole[:, 0], kind="stable")]
    bounds = np.ascontiguousarray(whole[:, :4], np.int32)
    return Chunks(bounds[:, :2], bounds[:, 2:], whole[:, 4].astype(np.uint8))


def _match(student: Side, teacher: Side, stretch: IntArray) -> IntArray:
    """A stretch as matches and what lies between them, int64 [chunks, 5]: bounds of both sides,
    kind.
    """
    i0, i1, j0, j1 = (int(bound) for bound in stretch)
    rows, columns = i1 - i0, j1 - j0
    width = min(columns + 1, max(CELLS // (rows + 1), 1))
    shape = (rows + 1, width)
    found = np.empty((min(rows, columns), 4), np.int32)
    count = match_tokens(
        *(
            student.data,
            student.ends,
            student.open,
            i0,
            i1,
            teacher.data,
            teacher.ends,
            teacher.open,
            j0,
            j1,
        ),
        *(
            np.zeros(shape, np.int32),
            np.empty(shape, np.uint8),
            np.empty((*shape, 2), np.uint8),
            found,
        ),
    )
    chunks, i, j = [], i0, j0
    for i_begin, i_end, j_begin, j_end in [*found[len(found) - count :].tolist(), (i1, i1, j1, j1)]:
        if i < i_begin and j < j_begin:
            chunks.append((i, i_begin, j, j_begin, DIFFERENT))
        if i_begin < i_end:
            chunks.append((i_begin, i_end, j_begin, j_end, EQUIVALENT))
        i, j = i_end, j_end
    return np.array(chunks, np.int64).reshape(-1, 5)
