"""The scan over token ids: which belong to turns that are trained.

One pass a row, no memory but the output's. A word of 64 bits, one for each value of an id's lowest six bits, tells for
almost every token that no marker begins with it; only the others are compared. Written with plain loops, because LLVM
turns the fills into vector code and the searches wait for nothing but the ids.

Tables, all int64 (`boundaries.ScanTable` builds them; markers are slices of `ids_of_markers`):

    starts       [starts, 5]      begin, end, begin of tails, end of tails, boundary; the best match first
    closings     [closings, 4]    begin, end, 1 if it is an `end` (0: an `until`), boundary; longest first
    turns        [boundaries, 5]  begin and end in `closings`, include_start, include_end, whether the end starts a turn
    filters      [boundaries + 1] uint64; of the closings of each boundary, and last of all starts
"""

import numpy as np

from penstock.compiled import inline_kernel, kernel

TURN, ALL, LAST, NONE = range(4)
"""What `train_on_eos` may be, in the order of `boundaries.EOS_MODES`."""


@inline_kernel
def _passes(filter_word, token_id):
    return (filter_word >> np.uint64(token_id & 63)) & np.uint64(1)


@inline_kernel
def _matches(ids, place, stop, markers, begin, end):
    length = end - begin
    same = np.int64(0)
    if place + length <= stop:
        while same < length and np.int64(ids[place + same]) == markers[begin + same]:
            same += 1
    return same == length


@inline_kernel
def _find_start(ids, place, stop, markers, starts):
    """Number of the start that matches at `place`, or −1. Its last token may be one of its tails instead."""
    for number in range(len(starts)):
        begin, end = starts[number, 0], starts[number, 1]
        if np.int64(ids[place]) != markers[begin] and end - begin > 1:
            continue
        if not _matches(ids, place, stop, markers, begin, end - 1) or place + end - begin > stop:
            continue
        last = np.int64(ids[place + end - begin - 1])
        if last == markers[end - 1]:
            return number
        low, high = starts[number, 2], starts[number, 3]
        while low < high:
            middle = (low + high) // 2
            if markers[middle] < last:
                low = middle + 1
            else:
                high = middle
        if low < starts[number, 3] and markers[low] == last:
            return number
    return -1


@inline_kernel
def _find_closing(ids, place, stop, markers, closings, first, last):
    """Number of the longest closing that matches at `place`, or −1."""
    for number in range(first, last):
        if _matches(ids, place, stop, markers, closings[number, 0], closings[number, 1]):
            return number
    return -1


@kernel
def scan_rows(ids, begins, ends, markers, starts, closings, turns, filters, trained, eos_mode, weights):
    """Write 1 for every token that is trained; `weights` comes zeroed.

    Args:
        ids: Token ids of all rows, any integer dtype, [tokens].
        begins: First token of each row that is no padding, int64 [rows]; `ends` likewise, behind the last.
        trained: uint8 [boundaries], whether its role is trained.
        eos_mode: TURN, ALL, LAST or NONE.
        weights: float32 [tokens].
    """
    start_filter = filters[len(turns)]
    for row in range(len(begins)):
        place, stop = begins[row], ends[row]
        last_begin = last_end = np.int64(0)
        while place < stop:
            if not _passes(start_filter, ids[place]):
                place += 1
                continue
            start = _find_start(ids, place, stop, markers, starts)
            if start < 0:
                place += 1
                continue
            boundary = starts[start, 4]
            content = place + starts[start, 1] - starts[start, 0]
            close, closing = content, np.int64(-1)
            closing_filter = filters[boundary]
            while close < stop:
                if _passes(closing_filter, ids[close]):
                    closing = _find_closing(ids, close, stop, markers, closings, turns[boundary, 0], turns[boundary, 1])
                    if closing >= 0:
                        break
                close += 1
            if trained[boundary]:
                if turns[boundary, 2]:
                    weights[place:content] = 1.0
                weights[content:close] = 1.0
            place = close
            if closing < 0 or not closings[closing, 2]:
                continue
            after = close + closings[closing, 1] - closings[closing, 0]
            if turns[boundary, 3]:
                if eos_mode == ALL or (eos_mode == TURN and trained[boundary]):
                    weights[close:after] = 1.0
                elif eos_mode == LAST and trained[boundary]:
                    last_begin, last_end = close, after
                if not turns[boundary, 4]:
                    place = after
        weights[last_begin:last_end] = 1.0


@kernel
def clear_ids(ids, masked, filter_word, weights):
    """Set the weight of every token whose id is among the sorted `masked` to 0; −0 and NaN cannot come of it."""
    for place in range(len(ids)):
        if _passes(filter_word, ids[place]):
            found = np.searchsorted(masked, np.int64(ids[place]))
            if found < len(masked) and masked[found] == np.int64(ids[place]):
                weights[place] = 0.0
