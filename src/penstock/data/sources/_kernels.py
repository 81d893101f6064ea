"""Reads the text field of JSON lines at gigabytes per second, as long as nothing about the lines is
unusual.

Each line must hold one object as RFC 8259 defines it. Anything else, and anything rare, stops the
kernel (`ODD`). A full parser then decides about each line and says what is wrong. It would also
accept any line that is read here, with the same text.
"""

import numpy as np

from penstock.core.compiled import inline_kernel, kernel, kernel_part, trailing_zeros, view_u8
from penstock.core.vectors import CACHE_LINE, copy_line, find_bytes

ODD = -1
"""Returned instead of a position: not read here."""

_MAX_DEPTH = 64
_LONGEST_NUMBER = 200
"""With an exponent of at most two digits, no number of this many characters reaches 1e308."""
_QUOTE, _COMMA, _MINUS, _POINT, _COLON, _BACKSLASH = b'",-.:\\'
_OBJECT, _LIST, _OBJECT_END, _LIST_END = b"{[}]"
_ZERO, _NINE, _EXPONENT, _PLUS, _HEXADECIMAL = b"09e+u"
_SPACE, _TAB, _RETURN, _NEWLINE = b" \t\r\n"
_ONE = np.uint64(1)

_ESCAPED = np.zeros(256, np.uint8)
"""Letter after a backslash → the character that it stands for; 0: not an escape."""
_ESCAPED[list(b'"\\/bfnrt')] = list(b'"\\/\b\f\n\r\t')

_DIGIT = np.full(256, -1, np.int64)
"""Hexadecimal digit → its value; −1: not a digit."""
_DIGIT[list(b"0123456789abcdefABCDEF")] = [*range(16), *range(10, 16)]

_WORDS = np.frombuffer(b"true false null ", np.uint8).copy()
_WORD_PLACES = np.zeros((256, 2), np.int64)
"""First letter of true, false or null → where the word begins and ends in `_WORDS`."""
_WORD_PLACES[list(b"tfn")] = [(0, 4), (5, 10), (11, 15)]


@inline_kernel
def _skip_spaces(data, at):
    while at < len(data) and (data[at] == _SPACE or data[at] == _TAB or data[at] == _RETURN):
        at += 1
    return at


@inline_kernel
def _skip_digits(data, at):
    while at < len(data) and _ZERO <= data[at] <= _NINE:
        at += 1
    return at


@inline_kernel
def _is(data, at, character):
    return at < len(data) and data[at] == character


@kernel_part
def _skip_number(data, at):
    """Where the number that begins at `at` ends; `ODD` also if it may exceed float64, which parsers
    refuse.
    """
    begin = at
    first = at + 1 if data[at] == _MINUS else at
    at = _skip_digits(data, first)
    if at == first or (data[first] == _ZERO and at > first + 1):
        return ODD
    if _is(data, at, _POINT):
        first = at + 1
        at = _skip_digits(data, first)
        if at == first:
            return ODD
    if at < len(data) and data[at] | 0x20 == _EXPONENT:
        first = at + 1
        if _is(data, first, _PLUS) or _is(data, first, _MINUS):
            first += 1
        at = _skip_digits(data, first)
        if at == first or at > first + 2:
            return ODD
    return at if at - begin <= _LONGEST_NUMBER else ODD


@kernel_part
def _skip_word(data, at):
    """Where the word true, false or null that begins at `at` ends."""
    begin, end = _WORD_PLACES[data[at]]
    if begin == end or at + end - begin > len(data):
        return ODD
    for i in range(begin, end):
        if data[at + i - begin] != _WORDS[i]:
            return ODD
    return at + end - begin


@inline_kernel
def _read_escape(data, at):
    """Value of the escape \\uXXXX at `at`, and where the escape ends."""
    if at + 6 > len(data) or data[at] != _BACKSLASH or data[at + 1] != _HEXADECIMAL:
        return 0, ODD
    code = 0
    for i in range(at + 2, at + 6):
        # Once −1, all later bits stay set.
        code = code << 4 | _DIGIT[data[i]]
    return code, at + 6 if code >= 0 else ODD


@kernel_part
def _read_character(data, at):
    """Character written as \\uXXXX, or as a surrogate pair, at `at`, and where its escapes end."""
    code, end = _read_escape(data, at)
    if 0xD800 <= code < 0xE000:
        low, end = _read_escape(data, end) if end > 0 and code < 0xDC00 else (0, ODD)
        if not 0xDC00 <= low < 0xE000:
            return 0, ODD
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
    return code, end


@kernel_part
def _write_character(out, to, code):
    """Write a character as UTF-8 and return where it ends."""
    if code < 0x80:
        out[to] = code
        return to + 1
    length = 2 if code < 0x800 else 3 if code < 0x10000 else 4
    for i in range(length - 1, 0, -1):
        out[to + i] = 0x80 | (code & 0x3F)
        code >>= 6
    out[to] = (0xF0 << (4 - length) & 0xFF) | code
    return to + length


@kernel_part
def _read_string(source, size, at, target, to):
    """Write the string with its first character at `at`; returns the positions after its quote and
    after the output.
    """
    data, out = view_u8(source, size), view_u8(target, size)
    while True:
        # Whole cache lines are written; the excess is overwritten later, or lies behind the last
        # text.
        while size - at >= CACHE_LINE:
            marks = find_bytes(source + np.uint64(at), _SPACE, _QUOTE, _BACKSLASH)
            copy_line(source + np.uint64(at), target + np.uint64(to))
            if marks:
                plain = np.int64(trailing_zeros(marks))
                at += plain
                to += plain
                break
            at += CACHE_LINE
            to += CACHE_LINE
        while at < size and data[at] >= _SPACE and data[at] != _QUOTE and data[at] != _BACKSLASH:
            out[to] = data[at]
            at += 1
            to += 1
        if _is(data, at, _QUOTE):
            return at + 1, to
        if not _is(data, at, _BACKSLASH) or at + 1 == size:
            return ODD, to
        short = _ESCAPED[data[at + 1]]
        if short:
            out[to] = short
            at += 2
            to += 1
        else:
            code, at = _read_character(data, at)
            if at < 0:
                return ODD, to
            to = _write_character(out, to, code)


@kernel_part
def _read_key(source, size, at, target, to):
    """Write the key at `at`; returns where its value begins and where the written key ends."""
    data = view_u8(source, size)
    if not _is(data, at, _QUOTE):
        return ODD, to
    at, end = _read_string(source, size, at + 1, target, to)
    if at < 0:
        return ODD, to
    at = _skip_spaces(data, at)
    return _skip_spaces(data, at + 1) if _is(data, at, _COLON) else ODD, end


@kernel_part
def _skip_value(source, size, at, target, to):
    """Where the value that begins at `at` ends; `to` is scratch space for its strings."""
    data = view_u8(source, size)
    depth, objects = 0, np.uint64(0)
    while at < size:
        first, opened = data[at], False
        if first == _QUOTE:
            at, _ = _read_string(source, size, at + 1, target, to)
        elif first in (_OBJECT, _LIST):
            at = _skip_spaces(data, at + 1)
            opened = not _is(data, at, _OBJECT_END if first == _OBJECT else _LIST_END)
            if not opened:
                at += 1
            elif depth == _MAX_DEPTH:
                return ODD
            else:
                depth += 1
                objects = objects << _ONE | np.uint64(first == _OBJECT)
        elif first == _MINUS or _ZERO <= first <= _NINE:
            at = _skip_number(data, at)
        else:
            at = _skip_word(data, at)
        # After a value: close all that ends with it, up to the comma before the next value.
        while not opened:
            if at < 0 or depth == 0:
                return at
            at = _skip_spaces(data, at)
            if _is(data, at, _COMMA):
                at = _skip_spaces(data, at + 1)
                break
            if not _is(data, at, _OBJECT_END if objects & _ONE else _LIST_END):
                return ODD
            at += 1
            depth -= 1
            objects >>= _ONE
        if objects & _ONE:
            at, _ = _read_key(source, size, at, target, to)
            if at < 0:
                return ODD
    return ODD


@kernel_part
def _read_object(source, size, at, name, target, to):
    """Write the text of the object that begins at `at`; returns where the object ends and where the
    text ends.

    Strings of other fields are written after the text, and overwritten later.
    """
    data, out = view_u8(source, size), view_u8(target, size)
    text_end = to
    while True:
        # `at` is the brace or the comma before a key.
        at, key_end = _read_key(source, size, _skip_spaces(data, at + 1), target, text_end)
        if at < 0:
            return ODD, to
        named = key_end - text_end == len(name)
        for i in range(len(name) if named else 0):
            named &= out[text_end + i] == name[i]
        if not named:
            at = _skip_value(source, size, at, target, text_end)
        elif text_end > to or not _is(data, at, _QUOTE):
            return ODD, to
        else:
            at, text_end = _read_string(source, size, at + 1, target, to)
        if at < 0 or (named and text_end == to):
            return ODD, to
        at = _skip_spaces(data, at)
        if _is(data, at, _OBJECT_END):
            return at + 1, text_end
        if not _is(data, at, _COMMA):
            return ODD, to


@kernel
def read_texts(source, size, name, target, ends, lines):
    """Read one text field of each line.

    Args:
        source: Address of whole lines, the last with or without its newline; size: their bytes.
        name: uint8 [letters], the field.
        target: Address of `size` bytes; the texts are written there end to end, as UTF-8 if the
            lines are UTF-8.
        ends: int64 [1 + n], written: 0, then where each text ends; n is given by `most_texts`.
        lines: int64 [n], written: number of newlines before each text.

    Returns:
        Number of texts, or `ODD`; number of newlines.
    """
    data = view_u8(source, size)
    at = to = rows = newlines = 0
    ends[0] = 0
    while True:
        at = _skip_spaces(data, at)
        if at == size:
            return rows, newlines
        if data[at] != _NEWLINE:
            begin = to
            at, to = (
                _read_object(source, size, at, name, target, begin)
                if data[at] == _OBJECT
                else (ODD, to)
            )
            if at < 0 or to == begin:
                return ODD, newlines
            lines[rows] = newlines
            rows += 1
            ends[rows] = to
            at = _skip_spaces(data, at)
        if at < size:
            if data[at] != _NEWLINE:
                return ODD, newlines
            at += 1
            newlines += 1
