"""Compiled parts of `encoding`: find control text in texts, and map tokens to characters.

Positions are bytes of UTF-8 unless they are called characters. Callers guarantee valid UTF-8 and
arrays that are large enough; nothing is allocated here.
"""

from penstock.core.compiled import inline_kernel, kernel


@inline_kernel
def _starts_character(byte):
    return byte & 0xC0 != 0x80


@inline_kernel
def _space_at(data, place, end):
    """Length in bytes of the whitespace character (Unicode's White_Space) at `place`; 0: there is
    none.
    """
    first = data[place]
    if first == 0x20 or 0x09 <= first <= 0x0D:
        return 1
    if first == 0xC2 and place + 1 < end:  # U+0085, U+00A0
        return 2 if data[place + 1] == 0x85 or data[place + 1] == 0xA0 else 0
    if place + 2 >= end:
        return 0
    second, third = data[place + 1], data[place + 2]
    if first == 0xE1:  # U+1680
        return 3 if second == 0x9A and third == 0x80 else 0
    if first == 0xE3:  # U+3000
        return 3 if second == 0x80 and third == 0x80 else 0
    if first == 0xE2 and second == 0x80:  # U+2000 to U+200A, U+2028, U+2029, U+202F
        return 3 if third <= 0x8A or third == 0xA8 or third == 0xA9 or third == 0xAF else 0
    return 3 if first == 0xE2 and second == 0x81 and third == 0x9F else 0  # U+205F


@inline_kernel
def _skip_spaces(data, place, end):
    """Where the whitespace that begins at `place` ends."""
    while place < end:
        size = _space_at(data, place, end)
        if size == 0:
            break
        place += size
    return place


@inline_kernel
def _skip_spaces_back(data, place, low):
    """Where the whitespace that ends at `place` begins, not before `low`."""
    while place > low:
        begin = place - 1
        while begin > low and not _starts_character(data[begin]):
            begin -= 1
        size = _space_at(data, begin, place)
        if size == 0 or begin + size != place:
            break
        place = begin
    return place


@inline_kernel
def _all_literal(data, begin, end, literal, character):
    """Whether all characters of `begin:end` are literal; the first one has number `character`."""
    for place in range(begin, end):
        if _starts_character(data[place]):
            if not literal[character]:
                return False
            character += 1
    return True


@inline_kernel
def _match(data, place, end, literal, character, steps, accepts, is_control):
    """(end, entry) of the longest entry at `place` that may be a token, and of the longest of all;
    entry -1: none.
    """
    state, at = 0, place
    valid_end, valid, any_end, found = place, -1, place, -1
    while at < end:
        state = steps[state, data[at]]
        if state == 0:
            break
        at += 1
        entry = accepts[state]
        if entry >= 0:
            any_end, found = at, entry
            if not is_control[entry] or _all_literal(data, place, at, literal, character):
                valid_end, valid = at, entry
    return valid_end, valid, any_end, found


@kernel
def find_items(
    data,
    text_offsets,
    literal,
    steps,
    accepts,
    is_control,
    lstrip,
    rstrip,
    items,
    text_items,
    forged,
    counts,
):
    """Cut texts at the control text that may become control tokens, into stretches of text and
    control entries.

    Args:
        data, text_offsets: UTF-8 of the texts, end to end.
        literal: Whether the template wrote each character.
        steps, accepts: The trie of entries: next state (0: none) by state and byte; entry that ends
            in a state, or -1.
        is_control, lstrip, rstrip: Flags of each entry.
        items: Out, int64 [·, 3]: begin, end, entry (-1: a stretch of text); none is empty, and they
            cover all bytes.
        text_items: Out, int64 [texts + 1]: first item of each text.
        forged: Out, int64 [·, 3]: text, character of the text, entry of control text that stays
            text.
        counts: Out, int64 [2]: numbers of items and forged items; a number larger than its array is
            the length needed.
    """
    num_items = num_forged = character = 0
    for text in range(len(text_offsets) - 1):
        text_items[text] = num_items
        place, end = text_offsets[text], text_offsets[text + 1]
        first_character, free, forged_end = character, place, place
        while place < end:
            if not _starts_character(data[place]):
                place += 1
                continue
            if steps[0, data[place]] == 0:
                place, character = place + 1, character + 1
                continue
            stop, entry, longest_stop, longest = _match(
                data, place, end, literal, character, steps, accepts, is_control
            )
            if longest != entry and place >= forged_end:
                if num_forged < len(forged):
                    forged[num_forged, 0], forged[num_forged, 1] = text, character - first_character
                    forged[num_forged, 2] = longest
                num_forged, forged_end = num_forged + 1, longest_stop
            if entry < 0:
                place, character = place + 1, character + 1
                continue
            begin = place
            if is_control[entry]:
                begin = _skip_spaces_back(data, place, free) if lstrip[entry] else place
                stop = _skip_spaces(data, stop, end) if rstrip[entry] else stop
                num_items = _emit(items, num_items, free, begin, -1)
                num_items = _emit(items, num_items, begin, stop, entry)
                free = stop
            while place < stop:
                character += _starts_character(data[place])
                place += 1
        num_items = _emit(items, num_items, free, end, -1)
    text_items[len(text_offsets) - 1] = num_items
    counts[0], counts[1] = num_items, num_forged


@inline_kernel
def _emit(items, count, begin, end, entry):
    """Write one item, if it is not empty and there is room; return the new count."""
    if begin == end:
        return count
    if count < len(items):
        items[count, 0], items[count, 1], items[count, 2] = begin, end, entry
    return count + 1


@kernel
def gather(data, begins, ends, out):
    """Copy the stretches `begins:ends` of `data` to `out`, end to end."""
    at = 0
    for row in range(len(begins)):
        for place in range(begins[row], ends[row]):
            out[at] = data[place]
            at += 1


@kernel
def place_tokens(
    data,
    text_offsets,
    items,
    text_items,
    rows,
    values,
    entry_ids,
    table_data,
    table_offsets,
    ids,
    begins,
    ends,
    control,
    tokens,
    token_offsets,
    exact,
):
    """Join the ids of stretches and control entries, and find the characters of its text that each
    token touches.

    Args:
        data, text_offsets, items, text_items: As `find_items` returns them.
        rows: int64 [items, 2]: begin and end of the ids of each stretch in `values`; not used for
            control entries.
        values: Ids of the stretches, uint32.
        entry_ids: Id of each entry, uint32.
        table_data, table_offsets: Bytes of each id; `table_offsets` is empty if there is no table.
        ids, begins, ends, control: Out, for each token: id; characters begin:end; whether it is a
            control token.
        tokens: Out, int64 [items, 2]: first token of each item, and its first character in its
            text.
        token_offsets: Out, int64 [texts + 1]: first token of each text.
        exact: Out, for each item: whether its ids spell its bytes, apart from one space before
            them; if not, begins and ends of its tokens are not set.
    """
    token = 0
    for text in range(len(text_offsets) - 1):
        token_offsets[text] = token
        character = 0
        for item in range(text_items[text], text_items[text + 1]):
            begin, end, entry = items[item, 0], items[item, 1], items[item, 2]
            tokens[item, 0], tokens[item, 1] = token, character
            first = character
            for place in range(begin, end):
                character += _starts_character(data[place])
            if entry >= 0:
                ids[token], begins[token], ends[token], control[token] = (
                    entry_ids[entry],
                    first,
                    character,
                    True,
                )
                exact[item] = True
                token += 1
                continue
            low, count = rows[item, 0], rows[item, 1] - rows[item, 0]
            for place in range(count):
                ids[token + place], control[token + place] = values[low + place], False
            exact[item] = _place_stretch(
                data, begin, end, first, values[low : low + count], table_data, table_offsets,
                begins[token : token + count], ends[token : token + count],
            )  # fmt: skip
            token += count
    token_offsets[len(text_offsets) - 1] = token


@inline_kernel
def _place_stretch(data, begin, end, character, values, table_data, table_offsets, begins, ends):
    """Place the tokens of a stretch; its first character is `character`. False: the ids spell other
    bytes.
    """
    spelled = 0
    if len(table_offsets) == 0:
        return False
    for value in values:
        spelled += table_offsets[value + 1] - table_offsets[value]
    extra = spelled - (end - begin)
    if extra < 0 or extra > 1:
        return False
    place = begin
    for token in range(len(values)):
        low, high = table_offsets[values[token]], table_offsets[values[token] + 1]
        if extra == 1 and low < high:
            if table_data[low] != 0x20:
                return False
            low, extra = low + 1, 0
        inside = low < high and not _starts_character(data[place])
        begins[token] = character - 1 if inside else character
        while low < high:
            if data[place] != table_data[low]:
                return False
            character += _starts_character(data[place])
            place, low = place + 1, low + 1
        ends[token] = character
    return True
