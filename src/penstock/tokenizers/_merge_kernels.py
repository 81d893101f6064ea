"""Kernels that learn merges from words: those of the `tokenizers` package, whose rules they follow
also where those are peculiar; the tests hold the two against each other.
"""

import numpy as np

from penstock.core.compiled import inline_kernel, kernel, kernel_part
from penstock.tokenizers._piece_kernels import HALF, INDEX, PRIME, find_run, hash_run

_NONE = -1

PAIR = np.dtype([("key", np.uint64), ("count", np.int64), ("head", np.int64)])
"""Two ids (left · 2³² + right), how often they stand next to each other, and the first of the words
in which they came up by the current merge.
"""

NODE = np.dtype([("word", np.int64), ("next", np.int64)])
"""A word in which a pair came up, and the next such word."""

ENTRY = np.dtype([("count", np.int64), ("key", np.uint64), ("pair", np.int64), ("head", np.int64)])
"""An entry of the queue: a pair, and the first of the words in which to merge it. The count may be
out of date.
"""

MERGE = np.dtype([("left", np.int64), ("right", np.int64), ("result", np.int64)])
"""One merge: two ids, and the id of the two together."""

_WORDS = 1 << 12
"""Words whose pairs are counted between two checks of the room."""

_PAIRS, _NODES, _CHANGED = range(3)
"""How many of each are in use."""


@kernel_part
def _grown(array, used, more):
    """The array, or a copy with room for `more` items after the `used` ones."""
    if used + more <= len(array):
        return array
    new = np.empty(2 * (used + more), array.dtype)
    for place in range(used):
        new[place] = array[place]
    return new


@inline_kernel
def _before(count, key, other):
    """Whether a pair is merged before an entry: the more frequent one is, of equals the one of
    smaller ids.
    """
    return count > other.count or (count == other.count and key < other.key)


@inline_kernel
def _put(queue, place, count, key, pair, head):
    queue[place].count, queue[place].key, queue[place].pair, queue[place].head = (
        count,
        key,
        pair,
        head,
    )


@kernel_part
def _push(queue, size, count, key, pair, head):
    """Add an entry to a queue, a binary heap of `size` entries."""
    place = size
    while place > 0 and _before(count, key, queue[(place - 1) // 2]):
        queue[place] = queue[(place - 1) // 2]
        place = (place - 1) // 2
    _put(queue, place, count, key, pair, head)


@kernel_part
def _replace_first(queue, size, count, key, pair, head):
    """Put an entry in place of a queue's first."""
    place = 0
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and _before(queue[child + 1].count, queue[child + 1].key, queue[child]):
            child += 1
        if _before(count, key, queue[child]):
            break
        queue[place] = queue[child]
        place = child
    _put(queue, place, count, key, pair, head)


@inline_kernel
def _key(left, right):
    return np.uint64(left) << HALF | np.uint64(right)


@inline_kernel
def _pair_place(slots, pairs, key):
    """The slot of a pair, or the empty one where it belongs."""
    mask = np.uint64(len(slots) - 1)
    value = key * PRIME
    place = (value ^ value >> HALF) & mask
    while slots[place] != 0 and pairs[slots[place] - 1].key != key:
        place = (place + np.uint64(1)) & mask
    return place


@inline_kernel
def _change(key, amount, word, slots, pairs, nodes, changed, used):
    """Count a pair `amount` times more in a word."""
    place = _pair_place(slots, pairs, key)
    if slots[place] == 0:
        new = used[_PAIRS]
        pairs[new].key, pairs[new].count, pairs[new].head = key, 0, _NONE
        used[_PAIRS] = slots[place] = new + 1
    pair = slots[place] - 1
    pairs[pair].count += amount
    if amount < 0:
        return
    head = pairs[pair].head
    if head == _NONE:
        changed[used[_CHANGED]] = pair
        used[_CHANGED] += 1
    elif nodes[head].word == word:
        return
    node = used[_NODES]
    nodes[node].word, nodes[node].next = word, head
    pairs[pair].head = node
    used[_NODES] += 1


@inline_kernel
def _merge_word(symbols, begin, end, merge, keys, signs):
    """Merge a pair in one word, from the left.

    Returns:
        The new end of the word, and the number of changes: pairs in `keys` that occur once more or
        less (`signs`).
    """
    left, right, result = merge.left, merge.right, merge.result
    read = write = begin
    changes = 0
    while read < end:
        if symbols[read] != left or read + 1 == end or symbols[read + 1] != right:
            symbols[write] = symbols[read]
            read, write = read + 1, write + 1
            continue
        if write > begin:
            keys[changes], signs[changes] = _key(symbols[write - 1], left), -1
            keys[changes + 1], signs[changes + 1] = _key(symbols[write - 1], result), 1
            changes += 2
        symbols[write] = result
        read, write = read + 2, write + 1
        if read < end:
            keys[changes], signs[changes] = _key(right, symbols[read]), -1
            keys[changes + 1], signs[changes + 1] = _key(result, symbols[read]), 1
            changes += 2
    return write, changes


@kernel_part
def _merge_words(
    words, num_words, merge, symbols, begins, lengths, counts, slots, pairs, nodes, changed, used
):
    """Merge a pair in some words, and count the pairs around it again."""
    longest = 0
    for place in range(num_words):
        longest = max(longest, lengths[words[place]])
    keys, signs = np.empty(2 * longest, np.uint64), np.empty(2 * longest, np.int64)
    for place in range(num_words):
        word = words[place]
        end, changes = _merge_word(
            symbols, begins[word], begins[word] + lengths[word], merge, keys, signs
        )
        lengths[word] = end - begins[word]
        for change in range(changes):
            amount = signs[change] * counts[word]
            _change(keys[change], amount, word, slots, pairs, nodes, changed, used)


@kernel_part
def _count_pairs(
    begin_word, end_word, symbols, begins, lengths, counts, slots, pairs, nodes, changed, used
):
    """Count the pairs of some words."""
    for word in range(begin_word, end_word):
        for at in range(begins[word], begins[word] + lengths[word] - 1):
            _change(
                _key(symbols[at], symbols[at + 1]),
                counts[word],
                word,
                slots,
                pairs,
                nodes,
                changed,
                used,
            )


@kernel_part
def _entry_words(node, nodes, lengths, words):
    """The words of an entry, their number, and the number of their ids."""
    count = total = 0
    while node != _NONE:
        words = _grown(words, count, 1)
        words[count] = nodes[node].word
        total += lengths[words[count]]
        node = nodes[node].next
        count += 1
    return words, count, total


@kernel_part
def _rehashed(slots, pairs, used, more):
    """The hash table of pairs, or a larger one if `more` pairs would take more than half of it."""
    if 2 * (used[_PAIRS] + more) <= len(slots):
        return slots
    size = len(slots)
    while size < 4 * (used[_PAIRS] + more):
        size *= 2
    new = np.zeros(size, np.int64)
    for pair in range(used[_PAIRS]):
        new[_pair_place(new, pairs, pairs[pair].key)] = pair + 1
    return new


@kernel_part
def _enqueue(queue, size, pairs, changed, used):
    """Add an entry for each pair that came up; returns the new size."""
    for place in range(used[_CHANGED]):
        pair = changed[place]
        if pairs[pair].count > 0:
            _push(queue, size, pairs[pair].count, pairs[pair].key, pair, pairs[pair].head)
            size += 1
        pairs[pair].head = _NONE
    used[_CHANGED] = 0
    return size


@kernel
def learn_merges(
    symbols, begins, lengths, counts, tokens, offsets, token_slots, num_tokens, vocab_size
):
    """Merge the most frequent pair of ids in all words, again and again.

    Args:
        symbols: The ids of the words' bytes, int32; what is left of each word after the call.
        begins: Where each word begins in `symbols`.
        lengths: Its number of ids.
        counts: How often it occurs.
        tokens: The bytes of all ids so far, one after another.
        offsets: Where those of each id begin, with room for `vocab_size` ids.
        token_slots: Hash table of the ids by their bytes, with room for twice `vocab_size`.
        num_tokens: Number of ids so far.
        vocab_size: Number of ids to stop at.

    Returns:
        The merges in order (`MERGE`), the bytes of all ids, and their number. A pair whose bytes
        are those of an existing id gives that id.
    """
    used = np.zeros(3, np.int64)
    slots, pairs = np.zeros(1 << 16, np.int64), np.empty(0, PAIR)
    nodes, changed, queue = np.empty(0, NODE), np.empty(0, np.int64), np.empty(0, ENTRY)
    merges, num_merges, size, words = np.empty(0, MERGE), 0, 0, np.empty(1, np.int64)
    for begin in range(0, len(counts), _WORDS):
        end = min(begin + _WORDS, len(counts))
        more = begins[end - 1] + lengths[end - 1] - begins[begin]
        slots, pairs = _rehashed(slots, pairs, used, more), _grown(pairs, used[_PAIRS], more)
        nodes, changed = _grown(nodes, used[_NODES], more), _grown(changed, used[_CHANGED], more)
        _count_pairs(
            begin, end, symbols, begins, lengths, counts, slots, pairs, nodes, changed, used
        )
    queue = _grown(queue, 0, used[_CHANGED])
    size = _enqueue(queue, size, pairs, changed, used)
    while size > 0 and num_tokens < vocab_size:
        pair, key, node = queue[0].pair, queue[0].key, queue[0].head
        count = pairs[pair].count
        if queue[0].count != count:
            _replace_first(queue, size, count, key, pair, node)
            continue
        if count < 1:
            break
        size -= 1
        last = queue[size]
        _replace_first(queue, size, last.count, last.key, last.pair, last.head)
        merges = _grown(merges, num_merges, 1)
        merge = merges[num_merges]
        merge.left, merge.right = np.int64(key >> HALF), np.int64(key & INDEX)
        more = (
            offsets[merge.left + 1]
            - offsets[merge.left]
            + offsets[merge.right + 1]
            - offsets[merge.right]
        )
        tokens = _grown(tokens, offsets[num_tokens], more)
        merge.result = _joined(merge.left, merge.right, tokens, offsets, token_slots, num_tokens)
        num_merges, num_tokens = num_merges + 1, max(num_tokens, merge.result + 1)
        words, num_words, total = _entry_words(node, nodes, lengths, words)
        more = 2 * min(total, num_tokens)  # a new pair has the merge's result on one side
        slots, pairs = _rehashed(slots, pairs, used, more), _grown(pairs, used[_PAIRS], more)
        nodes, changed = _grown(nodes, used[_NODES], total), _grown(changed, used[_CHANGED], total)
        _merge_words(
            words,
            num_words,
            merge,
            symbols,
            begins,
            lengths,
            counts,
            slots,
            pairs,
            nodes,
            changed,
            used,
        )
        queue = _grown(queue, size, used[_CHANGED])
        size = _enqueue(queue, size, pairs, changed, used)
    return merges[:num_merges], tokens, num_tokens


@kernel_part
def _joined(left, right, tokens, offsets, slots, num_tokens):
    """The id that spells `left` and `right`; a new one, with its bytes, if there is none."""
    begin = end = offsets[num_tokens]
    for part in (left, right):
        for at in range(offsets[part], offsets[part + 1]):
            tokens[end] = tokens[at]
            end += 1
    value = hash_run(tokens, begin, end)
    place = find_run(slots, value, tokens, begin, end, tokens, offsets)
    if slots[place] == 0:
        offsets[num_tokens + 1] = end
        slots[place] = value & ~INDEX | np.uint64(num_tokens + 1)
    return np.int64(slots[place] & INDEX) - 1
