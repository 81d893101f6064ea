"""Kernel of the alignment by strings: dynamic programming over tokens, in a band around the
diagonal.

Costs: at most CELLS cells per call, each up to 2 × LONGEST steps: 10 ms.
"""

from penstock.core.compiled import inline_kernel, kernel
from penstock.tokenizers._alignment_kernels import before

CELLS = 1 << 18
"""Cells of one table; longer stretches get a narrower band."""
LONGEST = 8
"""Maximum number of tokens of a match on either side."""
MATCH, SKIP_STUDENT, SKIP_TEACHER = 0, 1, 2


@inline_kernel
def _band(i, rows, columns, width):
    """The first column of row i's band."""
    return min(max(i * columns // max(rows, 1) - width // 2, 0), columns + 1 - width)


@inline_kernel
def _match_ending(s_data, s_ends, s_open, i0, i, t_data, t_ends, t_open, j0, j):
    """(tokens, tokens, bytes) of the shortest match that ends before tokens i and j; 0 bytes:
    none.
    """
    if not s_open[i - 1] or not t_open[j - 1]:
        return 0, 0, 0
    s_end, t_end = s_ends[i - 1], t_ends[j - 1]
    p, q = 1, 1
    while p <= LONGEST and q <= LONGEST and i - p >= i0 and j - q >= j0:
        u, v = s_end - before(s_ends, i - p), t_end - before(t_ends, j - q)
        if (
            u > 0
            and u == v
            and (i - p == 0 or s_open[i - p - 1])
            and (j - q == 0 or t_open[j - q - 1])
        ):
            for k in range(1, u + 1):
                if s_data[s_end - k] != t_data[t_end - k]:
                    return 0, 0, 0
            return p, q, u
        if u <= v:
            p += 1
        else:
            q += 1
    return 0, 0, 0


@kernel
def match_tokens(
    s_data, s_ends, s_open, i0, i1, t_data, t_ends, t_open, j0, j1, scores, moves, sizes, found
):
    """The matches of tokens i0:i1 with tokens j0:j1, in order, that agree in most bytes; how many.

    Args:
        scores: Scratch, int32 [rows + 1, band]; likewise `moves`, uint8, and `sizes`, uint8 [rows +
            1, band, 2].
        found: Written from its end backwards, int32 [matches, 4]: ranges of the student's and the
            teacher's tokens.
    """
    rows, columns, width = i1 - i0, j1 - j0, scores.shape[1]
    for r in range(rows + 1):
        low = _band(r, rows, columns, width)
        for w in range(width):
            c = low + w
            best, move = 0, SKIP_TEACHER if c > 0 else SKIP_STUDENT
            above = c - _band(r - 1, rows, columns, width) if r > 0 else -1
            if 0 <= above < width:
                best, move = scores[r - 1, above], SKIP_STUDENT
            if w > 0 and scores[r, w - 1] > best:
                best, move = scores[r, w - 1], SKIP_TEACHER
            if r > 0 and c > 0:
                p, q, size = _match_ending(
                    s_data, s_ends, s_open, i0, i0 + r, t_data, t_ends, t_open, j0, j0 + c
                )
                if size > 0:
                    start = c - q - _band(r - p, rows, columns, width)
                    if 0 <= start < width and scores[r - p, start] + size >= best:
                        best, move = scores[r - p, start] + size, MATCH
                        sizes[r, w, 0], sizes[r, w, 1] = p, q
            scores[r, w], moves[r, w] = best, move
    return _trace(i0, j0, rows, columns, width, moves, sizes, found)


@inline_kernel
def _trace(i0, j0, rows, columns, width, moves, sizes, found):
    """Walk back from the last cell; the number of matches."""
    r, c, count = rows, columns, 0
    while r > 0 and c > 0:
        w = c - _band(r, rows, columns, width)
        if w < 0:
            r -= 1
        elif w >= width or moves[r, w] == SKIP_TEACHER:
            c -= 1
        elif moves[r, w] == SKIP_STUDENT:
            r -= 1
        else:
            p, q = int(sizes[r, w, 0]), int(sizes[r, w, 1])
            count += 1
            row = len(found) - count
            found[row, 0], found[row, 1] = i0 + r - p, i0 + r
            found[row, 2], found[row, 3] = j0 + c - q, j0 + c
            r -= p
            c -= q
    return count
