"""Compiled masks: the scan for role boundaries over token ids, and the painting of weights on
characters.

The scan makes one pass over each row and needs no memory except its output. A filter word of 64
bits, one for each value of an id's lowest six bits, rules out almost every token as the beginning
of a marker; only the others are compared. Plain loops, because LLVM turns the fills into vector
code, and the searches are bound by reading the ids.

Tables, int64 unless noted (`scanning._tabulate` builds them; markers are slices of `markers`):

    starts       [starts, 5]      begin, end, begin of tails, end of tails, boundary; longest first
    closings     [closings, 4]    begin, end, 1 if it is an `end` (0: an `until`), boundary; longest first
    turns        [boundaries, 5]  begin and end in `closings`, include_start, include_end, whether the end starts a turn
    filters      [boundaries + 1] uint64; for the closings of each boundary, and last for all starts
"""  # noqa: E501

import numpy as np

from penstock.core.compiled import inline_kernel, kernel

TURN, ALL, LAST, NONE = range(4)
"""Values of `train_on_eos`, in the order of `scanning.EOS_MODES`."""


@inline_kernel
def _next_candidate(ids, place, stop, filter_word):
    """The first place, from `place` on, with an id that passes the filter; `stop` if there is none.

    Eight ids per branch, in vector code; unsigned places, because Numba checks signed ones for
    negative values.
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
    """Number of the start that matches at `place`, or −1. Its last token may be one of its tails
    instead.
    """
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
def scan_rows(
    ids, begins, ends, markers, starts, closings, turns, filters, trained, eos_mode, weights
):
    """Write 1 for every trained token.

    Args:
        ids: Token ids of all rows, any integer dtype, [tokens].
        begins, ends: First token of each row that is no padding, and one after its last, int64
            [rows].
        markers, starts, closings, turns, filters: See the module.
        trained: Whether the role of each boundary is trained, uint8 [boundaries].
        eos_mode: TURN, ALL, LAST or NONE.
        weights: float32 [tokens]; must be 0 before.
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
                closing = _find_closing(
                    ids, close, stop, markers, closings, turns[boundary, 0], turns[boundary, 1]
                )
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
    """Set the weight of every token with an id in the sorted `masked` to 0."""
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
    """Number of ones in [begin, end), in vector code."""
    count = np.uint64(0)
    for place in range(np.uint64(begin), np.uint64(end)):
        count += np.uint64(real[place])
    return np.int64(count)


@kernel
def find_extents(real, begins, ends):
    """Cut each row to its real tokens; return whether any row has padding between them.

    Args:
        real: 1 for a token, 0 for padding, uint8 [tokens].
        begins, ends: Begin and end of each row, int64 [rows]; overwritten.
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


@kernel
def paint(begins, ends, values, canvas):
    """Set canvas[begins[i]:ends[i]] to values[i] for each stroke i in order; begins, ends: int64
    [strokes].
    """
    for stroke in range(len(begins)):
        value = values[stroke]
        for place in range(begins[stroke], ends[stroke]):
            canvas[place] = value


@kernel
def weigh_tokens(begins, ends, characters, owners, weights, straddling, token_owners):
    """Give each token the weight of its last character and the owner of its first.

    Args:
        begins, ends: Characters of each token, int64 [tokens].
        characters, owners: Weight and message of each character, float32 and int32 [characters].
        weights: Out, float32 [tokens]; 0 for a token without characters.
        straddling: Out, bool [tokens]: whether its characters have different weights.
        token_owners: Out, int64 [tokens]; −1 for a token without characters.
    """
    for token in range(len(begins)):
        begin, end = begins[token], ends[token]
        weights[token], straddling[token], token_owners[token] = 0, False, -1
        if begin < end:
            weight = characters[end - 1]
            weights[token], token_owners[token] = weight, owners[begin]
            for place in range(begin, end - 1):
                if characters[place] != weight:
                    straddling[token] = True
