"""Kernels that find the ids of pieces in a hash table.

A slot is four uint64: a piece of at most 15 bytes itself, with its length in the highest byte; of a
longer one a hash, and length and place of its bytes among `words`, with `SPELLED` in the highest
byte; then its value. The length of an empty slot is 0. A value has the number of ids in its upper
16 bits; below them the id, if it is one; two ids of less than 24 bits; or where they are among
`kept`. The value of a piece whose ids are not known yet is `NEW`, and which new one it is.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from penstock.core.compiled import inline_kernel, kernel, prefetch
from penstock.tokenizers._piece_kernels import equal_bytes, hash_run

WIDTH = 4
SHORT = 15
SPELLED = np.uint64(0xFF)
NEW = np.uint64(0xFFFF)

_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_THIRD = np.uint64(0xD6E8FEB86659FD93)
_HALF, _TOP, _COUNT, _ID = np.uint64(32), np.uint64(56), np.uint64(48), np.uint64(24)
_LOW32, _LOW24 = np.uint64(0xFFFFFFFF), np.uint64(0xFFFFFF)
_LOW48, _LOW40 = np.uint64((1 << 48) - 1), np.uint64((1 << 40) - 1)
_EIGHT, _ONE = np.uint64(8), np.uint64(1)
_LENGTH = np.uint64(40)
_GROUP = 16
"""Pieces that are looked up together."""
_NO_MERGE = ~np.uint64(0)


@intrinsic
def _load(typing_context, array, at):
    """The eight bytes of an array of bytes from a place on, as uint64; they must be inside it."""

    def codegen(context, builder, signature, arguments):
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        place = cgutils.gep(builder, data, arguments[1])
        word = builder.bitcast(place, ir.IntType(64).as_pointer())
        return builder.load(word, align=1)

    return types.uint64(array, types.intp), codegen


@inline_kernel
def _low_bytes(count):
    """Ones in the lowest bytes, of up to eight."""
    if count >= 8:
        return ~np.uint64(0)
    return (_ONE << np.uint64(8 * count)) - _ONE


@inline_kernel
def _key(data, begin, length, safe):
    """The two halves of the key of a short piece, whose first 16 bytes may be read if it begins up
    to `safe`.
    """
    low = high = np.uint64(0)
    if begin <= safe:
        low = _load(data, begin) & _low_bytes(length)
        high = _load(data, begin + 8) & _low_bytes(max(length - 8, 0))
    else:
        for step in range(min(length, 8)):
            low |= np.uint64(data[begin + step]) << np.uint64(8 * step)
        for step in range(8, length):
            high |= np.uint64(data[begin + step]) << np.uint64(8 * (step - 8))
    return low, high | np.uint64(length) << _TOP


@inline_kernel
def _mixed(low, high):
    value = (low * _FIRST) ^ (high * _SECOND)
    value = (value ^ value >> _HALF) * _THIRD
    return value ^ value >> _HALF


@inline_kernel
def _find_short(slots, place, mask, low, high):
    """The first word of the slot of a short piece, or of the empty one where it belongs."""
    while True:
        slot = (place & mask) * np.uint64(WIDTH)
        if (slots[slot] == low and slots[slot + _ONE] == high) or slots[slot + _ONE] == 0:
            return slot
        place += _ONE


@inline_kernel
def _find_long(slots, place, mask, value, data, begin, length, words):
    """The same of a longer piece."""
    while True:
        slot = (place & mask) * np.uint64(WIDTH)
        spelled = slots[slot + _ONE]
        if spelled == 0:
            return slot
        if slots[slot] == value and spelled >> _LENGTH == _long_key(length, 0) >> _LENGTH:
            if equal_bytes(data, begin, words, np.int64(spelled & _LOW40), length):
                return slot
        place += _ONE


@inline_kernel
def _long_key(length, place):
    return SPELLED << _TOP | np.uint64(length) << _LENGTH | np.uint64(place)


@kernel
def find_values(data, pieces, at, longest, slots, address, words, state, new, values):
    """Find the values of pieces in a hash table; unknown pieces are put there, and listed.

    Args:
        data: Bytes, uint8.
        pieces: Begins and ends, int32 [2, pieces].
        at: The piece to begin with.
        longest: Longer pieces are not put into the table.
        slots: The hash table, uint64 [4 × slots].
        address: Of `slots`.
        words: The bytes of longer pieces, one after another, uint8.
        state: Pieces in the table, bytes in `words`, new pieces; int64 [3], rewritten.
        new: Begin, end and slot of new pieces, int64 [3, pieces]; slot -1: not in the table.
        values: The value of each piece, uint64 [pieces].

    Returns:
        The piece where it stopped: after the last one, or because half of the slots are taken, or
        for want of room for words.
    """
    size, used, count = state[0], state[1], state[2]
    mask = np.uint64(len(slots) // WIDTH - 1)
    most = len(slots) // (2 * WIDTH)
    safe = len(data) - 16
    begins, ends = pieces[0], pieces[1]
    keys = np.empty((3, _GROUP), np.uint64)
    is_full = False
    while at < len(values) and not is_full:
        group = min(len(values) - at, _GROUP)
        # Slots are fetched together, as most of them are far from each other.
        for place in range(group):
            begin = np.int64(begins[at + place])
            length = np.int64(ends[at + place]) - begin
            if length <= SHORT:
                low, high = _key(data, begin, length, safe)
                value = _mixed(low, high)
            elif length <= longest:
                low = hash_run(data, begin, begin + length)
                high = np.uint64(0)
                value = _mixed(low, np.uint64(length))
            else:
                low = high = value = np.uint64(0)
            keys[0, place], keys[1, place], keys[2, place] = low, high, value
            prefetch(address + (value & mask) * np.uint64(8 * WIDTH))
        for place in range(group):
            begin = np.int64(begins[at])
            length = np.int64(ends[at]) - begin
            slot = np.int64(-1)
            low, high, value = keys[0, place], keys[1, place], keys[2, place]
            if length <= SHORT:
                slot = np.int64(_find_short(slots, value, mask, low, high))
            elif length <= longest:
                slot = np.int64(_find_long(slots, value, mask, low, data, begin, length, words))
            if slot >= 0 and slots[slot + 1] != 0:
                values[at] = slots[slot + 2]
                at += 1
                continue
            value = NEW << _COUNT | np.uint64(count)
            if slot >= 0:
                if size == most or (length > SHORT and used + length > len(words)):
                    is_full = True
                    break
                size += 1
                if length > SHORT:
                    high = _long_key(length, used)
                    for step in range(length):
                        words[used + step] = data[begin + step]
                    used += length
                slots[slot], slots[slot + 1], slots[slot + 2] = low, high, value
            new[0, count], new[1, count], new[2, count] = begin, begin + length, slot
            count += 1
            values[at] = value
            at += 1
    state[0], state[1], state[2] = size, used, count
    return at


@kernel
def double_slots(slots, larger, moved):
    """Fill an empty table of twice the size; `moved`: slots of new pieces, int64, rewritten."""
    mask = np.uint64(len(larger) // WIDTH - 1)
    for slot in range(0, len(slots), WIDTH):
        low, high = slots[slot], slots[slot + 1]
        if high == 0:
            continue
        length = high >> _TOP
        other = high
        if length == SPELLED:
            other = high >> _LENGTH & np.uint64(0xFFFF)
        place = _mixed(low, other) & mask
        while larger[place * np.uint64(WIDTH) + _ONE] != 0:
            place = (place + _ONE) & mask
        to = np.int64(place) * WIDTH
        larger[to], larger[to + 1], larger[to + 2] = low, high, slots[slot + 2]
        if slots[slot + 2] >> _COUNT == NEW:
            moved[np.int64(slots[slot + 2] & _LOW48)] = to


@kernel
def settle_values(slots, places, starts, counts, ids, used):
    """Give new pieces their values.

    Args:
        slots: The hash table, uint64 [4 × slots].
        places: The slot of each new piece, int64; -1: it is not in the table.
        starts: Where the ids of each begin, int64 [new pieces].
        counts: Their number, int64 [new pieces].
        ids: Their ids, uint32.
        used: Where `ids` will be among the kept ones.
    """
    for piece in range(len(places)):
        if places[piece] < 0:
            continue
        begin, count = starts[piece], counts[piece]
        value = np.uint64(used + begin)
        if count == 1:
            value = np.uint64(ids[begin])
        elif count == 2:
            if np.uint64(ids[begin]) <= _LOW24 and np.uint64(ids[begin + 1]) <= _LOW24:
                value = np.uint64(ids[begin]) << _ID | np.uint64(ids[begin + 1])
            else:
                value |= _ONE << np.uint64(47)
        slots[places[piece] + 2] = np.uint64(count) << _COUNT | value


@kernel
def count_ids(values, counts, total, bounds):
    """Write where the ids of pieces end, when they are joined.

    Args:
        values: Of the pieces, uint64.
        counts: The number of ids of each new piece, int64 [new pieces].
        total: Ids before these pieces.
        bounds: Where those of each end, int64 [pieces].

    Returns:
        Ids up to the last piece.
    """
    for piece in range(len(values)):
        value = values[piece]
        count = value >> _COUNT
        if count == NEW:
            total += counts[np.int64(value & _LOW48)]
        else:
            total += np.int64(count)
        bounds[piece] = total
    return total


@kernel
def join_ids(values, starts, counts, new_ids, kept, joined):
    """Join the ids of pieces.

    Args:
        values: Of the pieces, uint64.
        starts: Where the ids of each new piece begin, int64 [new pieces].
        counts: Their number, int64 [new pieces].
        new_ids: Those ids, uint32.
        kept: Ids of which values tell the place, uint32.
        joined: The ids of the pieces, uint32, exactly as many as there are.
    """
    at = 0
    for piece in range(len(values)):
        value = values[piece]
        count = np.int64(value >> _COUNT)
        if count == 1:
            joined[at] = np.uint32(value & _LOW32)
            at += 1
        elif np.uint64(count) == NEW:
            which = np.int64(value & _LOW48)
            for step in range(starts[which], starts[which] + counts[which]):
                joined[at] = new_ids[step]
                at += 1
        elif count == 2 and value >> np.uint64(47) & _ONE == 0:
            joined[at] = np.uint32(value >> _ID & _LOW24)
            joined[at + 1] = np.uint32(value & _LOW24)
            at += 2
        else:
            begin = np.int64(value & (_LOW48 >> _ONE))
            for step in range(begin, begin + count):
                joined[at] = kept[step]
                at += 1


@inline_kernel
def _pair_slot(merges, mask, key):
    place = _mixed(key, _FIRST) & mask
    while merges[2 * np.int64(place)] != key and merges[2 * np.int64(place) + 1] != _NO_MERGE:
        place = (place + _ONE) & mask
    return 2 * np.int64(place)


@inline_kernel
def _merge_of(merges, mask, left, right):
    """Rank and id of a merge, the rank in the upper half; `_NO_MERGE` if there is none."""
    return merges[_pair_slot(merges, mask, left << _HALF | right) + 1]


@kernel
def fill_merges(lefts, rights, made, merges):
    """Fill a hash table of merges; the last of equal pairs counts, as in the tokenizers package.

    Args:
        lefts: Ids, uint32, in order of rank; likewise `rights`.
        made: The ids that they make, uint32.
        merges: uint64 [2 × slots], all bits set: pairs, and what `_merge_of` gives.
    """
    mask = np.uint64(len(merges) // 2 - 1)
    for rank in range(len(lefts)):
        key = np.uint64(lefts[rank]) << _HALF | np.uint64(rights[rank])
        slot = _pair_slot(merges, mask, key)
        merges[slot] = key
        merges[slot + 1] = np.uint64(rank) << _HALF | np.uint64(made[rank])


@kernel
def merge_pieces(data, begins, ends, byte_ids, merges, longest, ids, starts, counts):
    """Encode pieces by merges: always the pair of the lowest rank, the leftmost first.

    Args:
        data: Bytes, uint8.
        begins: Where each piece begins, int64 [pieces].
        ends: Where each ends, int64 [pieces].
        byte_ids: The id of each byte, int64 [256]; -1: none.
        merges: Of `fill_merges`.
        longest: Longer pieces are not encoded.
        ids: Room for as many ids as the pieces have bytes, uint32.
        starts: Where the ids of each piece begin, int64 [pieces]; rewritten.
        counts: Their number, int64 [pieces]; rewritten; -1: not encoded.

    Returns:
        The number of ids.
    """
    mask = np.uint64(len(merges) // 2 - 1)
    parts, ways = np.empty(longest, np.uint64), np.empty(longest, np.uint64)
    total = 0
    for piece in range(len(begins)):
        begin, size = begins[piece], ends[piece] - begins[piece]
        starts[piece], counts[piece] = total, -1
        if size > longest:
            continue
        known = True
        for step in range(size):
            known &= byte_ids[data[begin + step]] >= 0
            parts[step] = np.uint64(byte_ids[data[begin + step]])
        if not known:
            continue
        for step in range(size - 1):
            ways[step] = _merge_of(merges, mask, parts[step], parts[step + 1])
        while size > 1:
            best = 0
            for step in range(1, size - 1):
                if ways[step] < ways[best]:
                    best = step
            way = ways[best]
            if way == _NO_MERGE:
                break
            size -= 1
            parts[best] = way & _LOW32
            for step in range(best + 1, size):
                parts[step] = parts[step + 1]
                ways[step - 1] = ways[step]
            if best > 0:
                ways[best - 1] = _merge_of(merges, mask, parts[best - 1], parts[best])
            if best + 1 < size:
                ways[best] = _merge_of(merges, mask, parts[best], parts[best + 1])
        for step in range(size):
            ids[total + step] = np.uint32(parts[step])
        counts[piece] = size
        total += size
    return total


@kernel
def spell_pieces(data, begins, ends, alphabet, separator, spelled):
    """Write pieces as characters that stand for bytes, each followed by a separator.

    Args:
        data: Bytes, uint8.
        begins: Where each piece begins, int64.
        ends: Where each ends, int64.
        alphabet: The character of each byte, uint16 [256].
        separator: A character.
        spelled: The characters, uint16, exactly as many as are needed.
    """
    count = 0
    for piece in range(len(begins)):
        for at in range(begins[piece], ends[piece]):
            spelled[count] = alphabet[data[at]]
            count += 1
        spelled[count] = separator
        count += 1
