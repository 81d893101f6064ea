"""Kernels of alignment: spelling ids, walking two tokenizations side by side, and finding each
other again.

A side is what `spell` writes: the bytes of its tokens end to end, where each token ends in them,
and its part: TEXT, 0 for a control token without a counterpart, else the bits of BOS and EOS and
above them the number of its pair.

Costs: a walk reads each byte once. After a difference, the near search looks at no more than
NEAR_REACH² / 2 places and the far search at 8 places per byte advanced, so time is linear in the
bytes.
"""

import numpy as np

from penstock.core.compiled import inline_kernel, kernel

TEXT = -1
"""Part of a token that spells text."""
BEGINS, ENDS, PAIRED = 1, 2, 4
"""Parts: bits of BOS and EOS; multiples of PAIRED are numbers of given pairs."""
EXACT, EQUIVALENT, CONTROL, DIFFERENT = 0, 1, 2, 3
DONE, DIFFERS, RESUMED = 0, 1, 2
"""How a walk ended: all bytes equal; stopped at a difference; continued after differences."""
NEAR_REACH, NEAR_RUN = 16, 8
FAR_RUN = 32
"""Equal bytes that prove a place: NEAR_RUN within NEAR_REACH bytes, else FAR_RUN."""
CONTROLS_AHEAD = 64
"""Consecutive control tokens in which a counterpart is searched."""
CANDIDATES = 8
"""Places with the same hash that are compared."""
PREFIX_BYTES = 16
"""Bytes that decide whether a space is the tokenizer's or the text's."""
SPACE = 0x20
HEAD_BYTES = 8
"""Bytes of a token that fit in one number."""
OFFSET_AT, MOST_BYTES = 24, (1 << 23) - 1
"""Layout of an entry: bit 0: it is not plain text; then 23 bits: number of bytes; from bit 24 on:
where they begin.
"""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@kernel
def count_bytes(ids, lengths):
    """Bytes that `ids` spell; −1 − place of an id outside the vocabulary."""
    total = 0
    for i in range(len(ids)):
        if ids[i] < 0 or ids[i] >= len(lengths):
            return -1 - i
        total += lengths[ids[i]]
    return total


@kernel
def spell(ids, table_data, table_offsets, data, ends):
    """Write the bytes of `ids` to `data`, and where each ends to `ends`."""
    at = 0
    for i in range(len(ids)):
        token = ids[i]
        for k in range(table_offsets[token], table_offsets[token + 1]):
            data[at] = table_data[k]
            at += 1
        ends[i] = at


@inline_kernel
def before(ends, i):
    """Byte position before token i."""
    return ends[i - 1] if i > 0 else 0


@inline_kernel
def _same_part(left, right):
    """Whether two control tokens are counterparts."""
    return (
        left > 0
        and right > 0
        and ((left & right & 3) != 0 or (left >= PAIRED and (left >> 2) == (right >> 2)))
    )


@inline_kernel
def _emit(student_bounds, teacher_bounds, kinds, count, i, i_end, j, j_end, kind):
    """Write a chunk, unless a side is empty; the number of chunks then."""
    if i == i_end or j == j_end:
        return count
    student_bounds[count, 0], student_bounds[count, 1] = i, i_end
    teacher_bounds[count, 0], teacher_bounds[count, 1] = j, j_end
    kinds[count] = kind
    return count + 1


@inline_kernel
def _pair_controls(
    s_ids, s_parts, t_ids, t_parts, i, j, student_bounds, teacher_bounds, kinds, count
):
    """Pair the control tokens that stand at one place, in order; (i, j, count) after them."""
    i_end, j_end = i, j
    while i_end < len(s_ids) and s_parts[s_ids[i_end]] != TEXT:
        i_end += 1
    while j_end < len(t_ids) and t_parts[t_ids[j_end]] != TEXT:
        j_end += 1
    for x in range(i, i_end):
        for y in range(j, min(j_end, j + CONTROLS_AHEAD)):
            if _same_part(s_parts[s_ids[x]], t_parts[t_ids[y]]):
                count = _emit(
                    student_bounds, teacher_bounds, kinds, count, x, x + 1, y, y + 1, CONTROL
                )
                j = y + 1
                break
    return i_end, j_end, count


@inline_kernel
def _all_known(ids, size):
    """Whether all ids are inside a vocabulary of `size`."""
    lowest, highest = 0, -1
    for i in range(len(ids)):
        lowest = min(lowest, ids[i])
        highest = max(highest, ids[i])
    return lowest == 0 and highest < size


@kernel
def walk_plain(
    s_ids,
    s_parts,
    s_data,
    s_entries,
    s_heads,
    s_spaced,
    t_ids,
    t_parts,
    t_data,
    t_entries,
    t_heads,
    t_spaced,
    student_bounds,
    teacher_bounds,
    kinds,
):
    """The walk over text that is the same on both sides, straight from the tables; the number of
    chunks.

    −1 in every special case, which `walk` handles. The chunks are those that `walk` would write.

    Args:
        s_entries: Of each id of the student, where its bytes begin in `s_data`, how many they are,
            and whether it is anything but plain text, packed; likewise `t_entries` of the teacher.
        s_heads: Its first HEAD_BYTES bytes, so that most tokens are compared at once; likewise
            `t_heads`.
    """
    n, m = len(s_ids), len(t_ids)
    i = j = count = 0
    if not _all_known(s_ids, len(s_entries)) or not _all_known(t_ids, len(t_entries)):
        return -1
    s_starts, t_starts = s_spaced, t_spaced
    while i < n and j < m:
        x, y = s_entries[s_ids[i]], t_entries[t_ids[j]]
        if (x | y) & 1:
            s_last, t_last = i, j
            i, j, count = _pair_controls(
                s_ids, s_parts, t_ids, t_parts, i, j, student_bounds, teacher_bounds, kinds, count
            )
            if i == s_last and j == t_last:
                return -1  # a token of no bytes
            s_starts, t_starts = (
                s_starts or (s_spaced and i > s_last),
                t_starts or (t_spaced and j > t_last),
            )
            continue
        first_i, first_j = i, j
        size = (x >> 1) & MOST_BYTES
        if size <= HEAD_BYTES and size == (y >> 1) & MOST_BYTES and not s_starts and not t_starts:
            if s_heads[s_ids[i]] != t_heads[t_ids[j]]:
                return -1
            i, j = i + 1, j + 1
            student_bounds[count, 0], student_bounds[count, 1] = first_i, i
            teacher_bounds[count, 0], teacher_bounds[count, 1] = first_j, j
            kinds[count] = EXACT
            count += 1
            continue
        p, q = x >> OFFSET_AT, y >> OFFSET_AT
        p_end, q_end = p + ((x >> 1) & MOST_BYTES), q + ((y >> 1) & MOST_BYTES)
        if s_starts:
            p, s_starts = p + (s_data[p] == SPACE), False
        if t_starts:
            q, t_starts = q + (t_data[q] == SPACE), False
        i, j = i + 1, j + 1
        while True:
            size = min(p_end - p, q_end - q)
            for k in range(size):
                if s_data[p + k] != t_data[q + k]:
                    return -1
            p, q = p + size, q + size
            if p == p_end and q == q_end:
                break
            if p == p_end:
                if i == n:
                    return count
                if s_entries[s_ids[i]] & 1:
                    return -1
                p = s_entries[s_ids[i]] >> OFFSET_AT
                p_end = p + ((s_entries[s_ids[i]] >> 1) & MOST_BYTES)
                i += 1
            else:
                if j == m:
                    return count
                if t_entries[t_ids[j]] & 1:
                    return -1
                q = t_entries[t_ids[j]] >> OFFSET_AT
                q_end = q + ((t_entries[t_ids[j]] >> 1) & MOST_BYTES)
                j += 1
        student_bounds[count, 0], student_bounds[count, 1] = first_i, i
        teacher_bounds[count, 0], teacher_bounds[count, 1] = first_j, j
        kinds[count] = EXACT
        count += 1
    return count


@inline_kernel
def _agree(s_data, t_data, a, b):
    """Whether the next PREFIX_BYTES agree, as far as both have some."""
    for k in range(min(PREFIX_BYTES, len(s_data) - a, len(t_data) - b)):
        if s_data[a + k] != t_data[b + k]:
            return False
    return True


@inline_kernel
def _skip_prefix(s_data, t_data, a, b, s_may, t_may):
    """Where the text begins on both sides, after a space that a tokenizer put before it.

    Such a tokenizer always adds a space, so a leading space is its own, unless the other side shows
    that it is not: ids from the middle of a document begin with a space of the text.
    """
    s_may = s_may and a < len(s_data) and s_data[a] == SPACE
    t_may = t_may and b < len(t_data) and t_data[b] == SPACE
    if not s_may and not t_may:
        return a, b
    if _agree(s_data, t_data, a + s_may, b + t_may):
        return a + s_may, b + t_may
    if _agree(s_data, t_data, a, b):
        return a, b
    if s_may and t_may:
        if _agree(s_data, t_data, a + 1, b):
            return a + 1, b
        if _agree(s_data, t_data, a, b + 1):
            return a, b + 1
    return a + s_may, b + t_may


@inline_kernel
def _run(s_data, t_data, x, y, most):
    """Equal bytes from x and y on, `most` at most."""
    run = 0
    while (
        run < most
        and x + run < len(s_data)
        and y + run < len(t_data)
        and s_data[x + run] == t_data[y + run]
    ):
        run += 1
    return run


@inline_kernel
def _find_near(s_data, t_data, x0, y0):
    """The nearest place after a difference where NEAR_RUN bytes agree, or all to the end of both;
    (−1, −1): none.
    """
    for distance in range(1, NEAR_REACH + 1):
        for dx in range(distance + 1):
            x, y = x0 + dx, y0 + distance - dx
            if x < len(s_data) and y < len(t_data):
                run = _run(s_data, t_data, x, y, NEAR_RUN)
                if run == NEAR_RUN or (
                    run > 0 and x + run == len(s_data) and y + run == len(t_data)
                ):
                    return x, y
    return -1, -1


@inline_kernel
def _bucket(data, at, size):
    """Place of FAR_RUN bytes in a hash table; its size is a power of two."""
    value = np.uint64(0)
    for k in range(FAR_RUN):
        value = value * MULTIPLIER + np.uint64(data[at + k])
    return np.int64((value >> np.uint64(24)) & np.uint64(size - 1))


@kernel
def index_places(data, heads, links):
    """Fill a hash table of all places that begin FAR_RUN bytes: in `heads` the first, in `links`
    the one after each.
    """
    heads[:] = -1
    for at in range(len(data) - FAR_RUN, -1, -1):
        bucket = _bucket(data, at, len(heads))
        links[at] = heads[bucket]
        heads[bucket] = at


@inline_kernel
def _find_far(s_data, t_data, x0, y0, heads, links):
    """The place with FAR_RUN equal bytes that skips the fewest bytes; (−1, −1): none."""
    best_x, best_y, best = -1, -1, len(s_data) + len(t_data)
    x = x0
    while x + FAR_RUN <= len(s_data) and x - x0 < best:
        bucket = _bucket(s_data, x, len(heads))
        while heads[bucket] >= 0 and heads[bucket] < y0:
            heads[bucket] = links[heads[bucket]]  # earlier places are not needed again
        y = heads[bucket]
        for _ in range(CANDIDATES):
            if y < 0 or x - x0 + y - y0 >= best:
                break
            if _run(s_data, t_data, x, y, FAR_RUN) == FAR_RUN:
                best_x, best_y, best = x, y, x - x0 + y - y0
                break
            y = links[y]
        x += 1
    return best_x, best_y


@inline_kernel
def _next_pair(s_ids, s_parts, t_ids, t_parts, i, j):
    """The next control tokens of both sides, where they are counterparts; else the ends of both."""
    while i < len(s_ids) and s_parts[s_ids[i]] <= 0:
        i += 1
    while j < len(t_ids) and t_parts[t_ids[j]] <= 0:
        j += 1
    if i < len(s_ids) and j < len(t_ids) and _same_part(s_parts[s_ids[i]], t_parts[t_ids[j]]):
        return i, j
    return len(s_ids), len(t_ids)


@inline_kernel
def _token_at(ends, ids, parts, low, i, place):
    """Number of tokens, from `low` on, to reach byte `place`, including tokens without bytes
    there.
    """
    while i > low and before(ends, i - 1) >= place:
        i -= 1
    while i < len(ends) and before(ends, i) < place:
        i += 1
    while i < len(ends) and ends[i] == place and parts[ids[i]] == TEXT:
        i += 1
    return i


@kernel
def walk(
    s_ids,
    s_parts,
    s_data,
    s_ends,
    s_open,
    s_spaced,
    t_ids,
    t_parts,
    t_data,
    t_ends,
    t_open,
    t_spaced,
    heads,
    links,
    student_bounds,
    teacher_bounds,
    kinds,
):
    """Walk both sides and write the finest chunks; (number of chunks, how it ended).

    Args:
        s_ids: The student's tokens; `s_parts`: the part of each id.
        s_data: Bytes of its tokens, end to end; `s_ends`: where each ends.
        s_open: Whether a chunk may end after each token.
        s_spaced: Whether the tokenizer puts a space before a text; likewise `t_…` of the teacher.
        heads: Table of `index_places` of `t_data`, and `links`; where they are empty, stop at the
            first difference.
        student_bounds: Written, as many rows as the shorter side has tokens; likewise
            `teacher_bounds` and `kinds`.
    """
    n, m = len(s_ends), len(t_ends)
    i = j = count = 0
    ended = DONE
    while i < n and j < m:
        if s_parts[s_ids[i]] != TEXT or t_parts[t_ids[j]] != TEXT:
            i, j, count = _pair_controls(
                s_ids, s_parts, t_ids, t_parts, i, j, student_bounds, teacher_bounds, kinds, count
            )
            continue
        first_i, first_j = i, j
        a, b = before(s_ends, i), before(t_ends, j)
        s_starts, t_starts = (
            i == 0 or s_parts[s_ids[i - 1]] != TEXT,
            j == 0 or t_parts[t_ids[j - 1]] != TEXT,
        )
        a, b = _skip_prefix(s_data, t_data, a, b, s_spaced and s_starts, t_spaced and t_starts)
        u = v = same = 0  # bytes taken on both sides, and how many of them are compared
        kind, apart = EXACT, False
        while True:
            s_closed, t_closed = i == first_i or s_open[i - 1], j == first_j or t_open[j - 1]
            if u == v and s_closed and t_closed and (u > 0 or apart):
                count = _emit(
                    student_bounds, teacher_bounds, kinds, count, first_i, i, first_j, j, kind
                )
                break
            if u < v or (u == v and (not s_closed or t_closed)):
                if i == n:
                    return count, ended
                if s_parts[s_ids[i]] != TEXT:
                    if u == 0 and v == 0 and not apart:
                        j = first_j  # what was taken so far spells nothing
                        break
                    kind = DIFFERENT  # a control token inside a token of the other side
                else:
                    u = s_ends[i] - a
                i += 1
            else:
                if j == m:
                    return count, ended
                if t_parts[t_ids[j]] != TEXT:
                    if u == 0 and v == 0 and not apart:
                        i = first_i
                        break
                    kind = DIFFERENT
                else:
                    v = t_ends[j] - b
                j += 1
            common = min(u, v)
            while same < common and s_data[a + same] == t_data[b + same]:
                same += 1
            if same >= common:
                continue
            if len(heads) == 0:
                return count, DIFFERS
            ended, kind, apart = RESUMED, DIFFERENT, True
            x, y = _find_near(s_data, t_data, a + same, b + same)
            if x < 0:
                x, y = _find_far(s_data, t_data, a + same, b + same, heads, links)
            if x < 0:
                i, j = _next_pair(s_ids, s_parts, t_ids, t_parts, i, j)
                count = _emit(
                    student_bounds, teacher_bounds, kinds, count, first_i, i, first_j, j, DIFFERENT
                )
                break
            a, b, same = x, y, 0
            i = _token_at(s_ends, s_ids, s_parts, first_i, i, x)
            j = _token_at(t_ends, t_ids, t_parts, first_j, j, y)
            u, v = before(s_ends, i) - a, before(t_ends, j) - b
    return count, ended
