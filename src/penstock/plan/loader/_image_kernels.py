"""Compiled: the distinct values of an array of 32-bit numbers as codes, and back."""

import numpy as np

from penstock.core.compiled import kernel

_MULTIPLIER = np.uint64(0x9E3779B1)
_LOW = np.uint64(0xFFFFFFFF)
EMPTY = -1


@kernel
def find_codes(bits, slots, shift, table, codes):
    """Write the code of each number into `codes`, and the numbers by code into `table`; returns how
    many they are.

    Args:
        bits: uint32 [n].
        slots: int32 [2^k] of EMPTY: a hash table of codes.
        shift: 32 − k.
        table: uint32 [most], with at most half as many numbers as there are slots.
        codes: uint16 [n].

    Returns:
        The number of codes, from 0 on in order of their first place; −1: they are more than `table`
        holds.
    """
    mask = len(slots) - 1
    known = 0
    last, last_code = ~bits[0], 0
    for i in range(len(bits)):
        number = bits[i]
        if number == last:
            codes[i] = last_code
            continue
        place = np.int64(((np.uint64(number) * _MULTIPLIER) & _LOW) >> np.uint64(shift))
        while True:
            code = slots[place]
            if code == EMPTY:
                if known == len(table):
                    return -1
                slots[place] = known
                table[known] = number
                code = known
                known += 1
                break
            if table[code] == number:
                break
            place = (place + 1) & mask
        last, last_code = number, code
        codes[i] = code
    return known


@kernel
def look_up(table, codes, out):
    """Write the number of each code: `table` and `out` uint32, `codes` uint8 or uint16, all below
    len(table).
    """
    for i in range(len(codes)):
        out[i] = table[codes[i]]
