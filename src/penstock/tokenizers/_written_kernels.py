"""Kernels that read the vocabulary and the merges of a large `tokenizer.json` where they are
written.

They take what JSON allows there, and nothing else: on anything unusual (half of a surrogate pair,
invalid UTF-8, a number that is no id) they give up, and the file is read as Python objects.
"""

import numpy as np

from penstock.core.compiled import inline_kernel, kernel

WINDOW = 4
"""Bytes of the parts of a text by which tokens are chosen."""
_QUOTE, _BACKSLASH, _COMMA, _COLON = ord('"'), ord("\\"), ord(","), ord(":")
_OPEN, _CLOSE, _ZERO, _U = ord("["), ord("]"), ord("0"), ord("u")
_HIGHEST = 2**31 - 1
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


@inline_kernel
def _skip(data, at, end):
    """The next place that is no whitespace."""
    while at < end and (data[at] == 32 or data[at] == 10 or data[at] == 13 or data[at] == 9):
        at += 1
    return at


@inline_kernel
def _hex_number(data, at, end):
    """The number that four hexadecimal digits write; −1: they are none."""
    if at + 4 > end:
        return -1
    value = 0
    for place in range(at, at + 4):
        c = np.int64(data[place])
        if 48 <= c <= 57:
            value = value * 16 + c - 48
        elif 97 <= c <= 102:
            value = value * 16 + c - 87
        elif 65 <= c <= 70:
            value = value * 16 + c - 55
        else:
            return -1
    return value


@inline_kernel
def _character(data, at, end):
    """Code point and length of the character of several bytes that begins here; length 0: it is no
    UTF-8.
    """
    first = np.int64(data[at])
    if 0xC2 <= first < 0xE0:
        length, code, least = 2, first & 0x1F, 0x80
    elif 0xE0 <= first < 0xF0:
        length, code, least = 3, first & 0x0F, 0x800
    elif 0xF0 <= first < 0xF5:
        length, code, least = 4, first & 0x07, 0x10000
    else:
        return 0, 0
    if at + length > end:
        return 0, 0
    for place in range(at + 1, at + length):
        c = np.int64(data[place])
        if c & 0xC0 != 0x80:
            return 0, 0
        code = code << 6 | c & 0x3F
    if code < least or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return 0, 0
    return code, length


@inline_kernel
def _put_utf8(out, size, code):
    """Write a code point; the new size."""
    if code < 0x80:
        out[size] = code
        return size + 1
    if code < 0x800:
        out[size] = 0xC0 | code >> 6
        out[size + 1] = 0x80 | code & 0x3F
        return size + 2
    if code < 0x10000:
        out[size] = 0xE0 | code >> 12
        out[size + 1] = 0x80 | code >> 6 & 0x3F
        out[size + 2] = 0x80 | code & 0x3F
        return size + 3
    out[size] = 0xF0 | code >> 18
    out[size + 1] = 0x80 | code >> 12 & 0x3F
    out[size + 2] = 0x80 | code >> 6 & 0x3F
    out[size + 3] = 0x80 | code & 0x3F
    return size + 4


@inline_kernel
def _put_escape(out, size, unit):
    out[size], out[size + 1] = _BACKSLASH, _U
    for place in range(4):
        out[size + 2 + place] = _HEX[unit >> (12 - 4 * place) & 15]
    return size + 6


@inline_kernel
def _put_ascii(out, size, code):
    """Write a code point as `json.dumps` does; the new size."""
    short = 0
    if code in (_QUOTE, _BACKSLASH):
        short = code
    elif 32 <= code <= 126:
        out[size] = code
        return size + 1
    elif code == 10:
        short = 110
    elif code == 9:
        short = 116
    elif code == 13:
        short = 114
    elif code == 8:
        short = 98
    elif code == 12:
        short = 102
    if short:
        out[size], out[size + 1] = _BACKSLASH, short
        return size + 2
    if code < 0x10000:
        return _put_escape(out, size, code)
    size = _put_escape(out, size, 0xD800 + (code - 0x10000 >> 10))
    return _put_escape(out, size, 0xDC00 + (code - 0x10000 & 0x3FF))


@inline_kernel
def _next(data, at, end):
    """The character of a JSON string at a place, and the place behind it; −1: it is none, or half
    of one.
    """
    c = np.int64(data[at])
    if c >= 0x80:
        code, length = _character(data, at, end)
        return code, at + length if length else -1
    if c != _BACKSLASH:
        return c, at + 1 if c >= 32 else -1
    if at + 1 >= end:
        return 0, -1
    c = np.int64(data[at + 1])
    if c in (_QUOTE, _BACKSLASH, 47):
        return c, at + 2
    if c == 110:
        return 10, at + 2
    if c == 116:
        return 9, at + 2
    if c == 114:
        return 13, at + 2
    if c == 98:
        return 8, at + 2
    if c == 102:
        return 12, at + 2
    if c != _U:
        return 0, -1
    code = _hex_number(data, at + 2, end)
    if code < 0 or 0xDC00 <= code < 0xE000:
        return 0, -1
    if code < 0xD800 or code >= 0xE000:
        return code, at + 6
    if at + 12 > end or data[at + 6] != _BACKSLASH or data[at + 7] != _U:
        return 0, -1
    low = _hex_number(data, at + 8, end)
    if low < 0xDC00 or low >= 0xE000:
        return 0, -1
    return 0x10000 + (code - 0xD800 << 10) + low - 0xDC00, at + 12


@inline_kernel
def _read_string(data, at, end, out, size):
    """Write a JSON string, whose opening quote is at `at`, as UTF-8; the place behind it, or −1,
    and the new size.
    """
    if at >= end or data[at] != _QUOTE:
        return -1, size
    at += 1
    while at < end:
        c = data[at]
        if c == _QUOTE:
            return at + 1, size
        if 32 <= c < 0x80 and c != _BACKSLASH:
            out[size] = c
            size += 1
            at += 1
        else:
            code, at = _next(data, at, end)
            if at < 0:
                return -1, size
            size = _put_utf8(out, size, code)
    return -1, size


@inline_kernel
def _read_merge(data, at, end, out):
    """Write the token that the merge at `at` makes; the place behind it, or −1, and the size."""
    if at >= end or data[at] != _OPEN:
        return -1, 0
    at, size = _read_string(data, _skip(data, at + 1, end), end, out, 0)
    if at < 0:
        return -1, 0
    at = _skip(data, at, end)
    if at >= end or data[at] != _COMMA:
        return -1, 0
    at, size = _read_string(data, _skip(data, at + 1, end), end, out, size)
    if at < 0:
        return -1, 0
    at = _skip(data, at, end)
    if at >= end or data[at] != _CLOSE:
        return -1, 0
    return at + 1, size


@inline_kernel
def _hash(data, begin, end):
    value = np.uint64(0xCBF29CE484222325)
    for place in range(begin, end):
        value = (value ^ np.uint64(data[place])) * np.uint64(0x100000001B3)
    return np.uint32(value ^ value >> np.uint64(32))


@kernel
def read_vocabulary(data, begin, end, texts, offsets, ids):
    """Read what is between the braces of a vocabulary; the number of entries, −1: it is unusual.

    Args:
        data: The file, uint8.
        begin: Where to begin; likewise `end`.
        texts: Written: the tokens in UTF-8, end to end; as long as what is read.
        offsets: Written: where each begins, and where the last ends.
        ids: Written.
    """
    at, size, count = _skip(data, begin, end), 0, 0
    offsets[0] = 0
    while count < len(ids):
        at, size = _read_string(data, at, end, texts, size)
        if at < 0:
            return -1
        at = _skip(data, at, end)
        if at >= end or data[at] != _COLON:
            return -1
        first = at = _skip(data, at + 1, end)
        number = 0
        while at < end and 48 <= data[at] <= 57 and number <= _HIGHEST:
            number = number * 10 + np.int64(data[at]) - 48
            at += 1
        if at == first or (data[first] == _ZERO and at > first + 1) or number > _HIGHEST:
            return -1
        ids[count] = number
        count += 1
        offsets[count] = size
        at = _skip(data, at, end)
        if at == end:
            return count
        if data[at] != _COMMA:
            return -1
        at = _skip(data, at + 1, end)
    return -1


@kernel
def read_merges(data, begin, end, scratch, begins, hashes):
    """Read what is between the brackets of merges; their number, −1: something is unusual.

    Args:
        data: The file, uint8.
        begin: Where to begin; likewise `end`.
        scratch: As long as the longest token.
        begins: Written: where each begins, and where the last ends.
        hashes: Written: those of the tokens that they make.
    """
    at, count = _skip(data, begin, end), 0
    while count < len(hashes):
        begins[count] = at
        at, size = _read_merge(data, at, end, scratch)
        if at < 0:
            return -1
        hashes[count] = _hash(scratch, 0, size)
        count += 1
        begins[count] = at
        at = _skip(data, at, end)
        if at == end:
            return count
        if data[at] != _COMMA:
            return -1
        at = _skip(data, at + 1, end)
    return -1


@kernel
def hash_texts(texts, offsets, hashes):
    """The hashes of texts, as `read_merges` gives them."""
    for place in range(len(hashes)):
        hashes[place] = _hash(texts, offsets[place], offsets[place + 1])


@kernel
def compact(data, begin, end, ascii_only, out):
    """Write JSON that was read before without the whitespace between its values; the size.

    Args:
        data: The file, uint8.
        begin: Where to begin; likewise `end`.
        ascii_only: Write strings as `json.dumps` does; otherwise they stay as they are.
        out: Written; with `ascii_only` six times as long as what is read, otherwise as long.
    """
    size, at, inside = 0, begin, False
    while at < end:
        c = data[at]
        if not inside:
            at += 1
            inside = c == _QUOTE
            if c != 32 and c != 10 and c != 13 and c != 9:
                out[size] = c
                size += 1
        elif c == _QUOTE:
            inside = False
            out[size] = c
            size += 1
            at += 1
        elif c != _BACKSLASH and (32 <= c < 127 or not ascii_only):
            out[size] = c
            size += 1
            at += 1
        elif not ascii_only:
            out[size], out[size + 1] = c, data[at + 1]
            size += 2
            at += 2
        else:
            code, at = _next(data, at, end)
            if at < 0:
                return -1
            size = _put_ascii(out, size, code)
    return size


@kernel
def write_entries(texts, offsets, ids, chosen, out):
    """Write entries of a vocabulary as `json.dumps` does, with a comma behind each; the size.

    Args:
        texts: The tokens in UTF-8, end to end; likewise `offsets` and `ids`.
        chosen: The entries to write.
        out: Written; long enough.
    """
    size = 0
    digits = np.empty(10, np.uint8)
    for entry in chosen:
        out[size] = _QUOTE
        size += 1
        at, end = offsets[entry], offsets[entry + 1]
        while at < end:
            code, length = np.int64(texts[at]), 1
            if code >= 0x80:
                code, length = _character(texts, at, end)
            at += length
            size = _put_ascii(out, size, code)
        out[size], out[size + 1] = _QUOTE, _COLON
        size += 2
        number, count = np.int64(ids[entry]), 0
        while number or not count:
            digits[count] = _ZERO + number % 10
            number //= 10
            count += 1
        for place in range(count):
            out[size + place] = digits[count - 1 - place]
        out[size + count] = _COMMA
        size += count + 1
    return size


@inline_kernel
def _compare(texts, begin, end, others, other_begin, other_end):
    """Below zero, zero or above, as a text is before, equal to or behind another."""
    for place in range(min(end - begin, other_end - other_begin)):
        a, b = np.int64(texts[begin + place]), np.int64(others[other_begin + place])
        if a != b:
            return a - b
    return (end - begin) - (other_end - other_begin)


@kernel
def sort_texts(texts, offsets, order, scratch):
    """Order texts by their bytes, which is the order of their code points; whether two are equal.

    Args:
        texts: In UTF-8, end to end; likewise `offsets`.
        order: Written: their places in order.
        scratch: As long as `order`.
    """
    number = len(order)
    # Most are told apart by their first eight bytes.
    keys = np.zeros(number, np.uint64)
    for place in range(number):
        order[place] = place
        for at in range(offsets[place], min(offsets[place] + 8, offsets[place + 1])):
            shift = np.uint64(56 - 8 * (at - offsets[place]))
            keys[place] |= np.uint64(texts[at]) << shift
    source, target, width, equal = order, scratch, 1, False
    while width < number:
        for begin in range(0, number, 2 * width):
            left, middle = begin, min(begin + width, number)
            right, end = middle, min(begin + 2 * width, number)
            for place in range(begin, end):
                takes_left = right >= end
                if left < middle and right < end:
                    a, b = source[left], source[right]
                    takes_left = keys[a] < keys[b]
                    if keys[a] == keys[b]:
                        found = _compare(
                            texts, offsets[a], offsets[a + 1], texts, offsets[b], offsets[b + 1]
                        )
                        equal = equal or found == 0
                        takes_left = found <= 0
                if takes_left:
                    target[place] = source[left]
                    left += 1
                else:
                    target[place] = source[right]
                    right += 1
        source, target, width = target, source, 2 * width
    order[:] = source  # itself after an even number of passes
    return equal


@kernel
def find_text(texts, offsets, order, wanted):
    """The place of a text, −1: it is not there."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        place = order[middle]
        found = _compare(texts, offsets[place], offsets[place + 1], wanted, 0, len(wanted))
        if found == 0:
            return np.int64(place)
        if found < 0:
            low = middle + 1
        else:
            high = middle
    return np.int64(-1)


@inline_kernel
def _window(data, at, table):
    """Where `table` says whether a text has these bytes."""
    value = np.uint32(0)
    for place in range(WINDOW):
        value = value << np.uint32(8) | np.uint32(data[at + place])
    return (value * np.uint32(0x9E3779B1)) >> np.uint32(8) & np.uint32(len(table) - 1)


@kernel
def mark_windows(data, table):
    """Mark all windows of a text in a table whose length is a power of two."""
    for at in range(len(data) - WINDOW + 1):
        table[_window(data, at, table)] = True


@inline_kernel
def _may_have(data, begin, end, table):
    """Whether all windows of a token are marked: where one is not, the text does not have it."""
    for at in range(begin, end - WINDOW + 1):
        if not table[_window(data, at, table)]:
            return False
    return True


@kernel
def choose_texts(texts, offsets, table, chosen):
    """Which tokens the marked text may have."""
    for place in range(len(chosen)):
        chosen[place] = _may_have(texts, offsets[place], offsets[place + 1], table)


@kernel
def choose_merges(data, begins, scratch, table, chosen):
    """Which merges make a token that the marked text may have."""
    for place in range(len(chosen)):
        _, size = _read_merge(data, begins[place], begins[place + 1], scratch)
        chosen[place] = _may_have(scratch, 0, size, table)
