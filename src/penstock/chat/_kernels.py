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
def _next_candidate(ids, place, stop, filter_word):
    """The first place, from `place` on, whose id passes the filter; `stop` if none does.

    Eight ids to a branch, in vector code: unsigned places, because Numba would look at each for a minus sign.
    """
    at = np.uint64(place)
    last = np.uint64(stop)
    while at + np.uint64(8) <= last:
        passed = np.uint64(0)
        for i in range(8):
            passed |= filter_word >> np.uint64(ids[at + np.uint64(i)] & 63)
        if passed & np.uint64(1):
            break
        at += np.uint64(8)
    while at < last and not (filter_word >> np.uint64(ids[at] & 63)) & np.uint64(1):
        at += np.uint64(1)
    return np.int64(at)


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
        while True:
            place = _next_candidate(ids, place, stop, start_filter)
            if place == stop:
                break
            start = _find_start(ids, place, stop, markers, starts)
            if start < 0:
                place += 1
                continue
            boundary = starts[start, 4]
            content = place + starts[start, 1] - starts[start, 0]
            close, closing = content, np.int64(-1)
            while True:
                close = _next_candidate(ids, close, stop, filters[boundary])
                if close == stop:
                    break
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
    """Set the weight of every token whose id is among the sorted `masked` to 0."""
    place, stop = np.int64(0), np.int64(len(ids))
    while True:
        place = _next_candidate(ids, place, stop, filter_word)
        if place == stop:
            break
        found = np.searchsorted(masked, np.int64(ids[place]))
        if found < len(masked) and masked[found] == np.int64(ids[place]):
            weights[place] = 0.0
        place += 1


@inline_kernel
def _count(real, begin, end):
    """How many are set, in vector code."""
    count = np.uint64(0)
    for place in range(np.uint64(begin), np.uint64(end)):
        count += np.uint64(real[place])
    return np.int64(count)


@kernel
def find_extents(real, begins, ends):
    """Cut each row to where its real tokens begin and end; whether there is padding between them.

    Args:
        real: 1 where a token is no padding, else 0, uint8 [tokens].
        begins: Where the row begins, int64 [rows]; written. `ends` likewise.
    """
    holes = False
    for row in range(len(begins)):
        begin, end = begins[row], ends[row]
        count = _count(real, begin, end)
        while begin < end and not real[begin]:
            begin += 1
        if _count(real, begin, begin + count) == count:
            end = begin + count
        else:
            holes = True
            while not real[end - 1]:
                end -= 1
        begins[row], ends[row] = begin, end
    return holes
