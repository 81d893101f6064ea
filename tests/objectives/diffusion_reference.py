"""Masked and block diffusion written out slowly from their definition: Fractions and lists."""

from fractions import Fraction

from denoise_reference import philox


def level(stretch, key, epsilon):
    lowest = max(int(epsilon * 2**32), 1)
    drawn = philox(stretch, 4, key)[0]
    return Fraction(2**32 - (drawn * (2**32 - lowest) >> 32), 2**32)


def word(place, key):
    """Of a chunk of 256 tokens, a block of four words for each of the first 64: the first word is
    of token i, the second of token 64 + i, and so on.
    """
    chunk, inside = divmod(place, 256)
    return philox(64 * chunk + inside % 64, 5, key)[inside // 64]


def noised(document, stretch, key, epsilon, mask):
    """(token, target, weight) of each (place, token, weight), at the level of one stretch."""
    t = level(stretch, key, epsilon)
    found = []
    for place, token, weight in document:
        if weight and Fraction(word(place, key), 2**32) < t:
            found.append((mask, token, float(Fraction(weight) / t)))
        else:
            found.append((token, -100, 0.0))
    return found


def places(tokens, weights):
    weights = [1.0] * len(tokens) if weights is None else weights
    return list(zip(range(len(tokens)), tokens, weights, strict=True))


def write(tokens, weights, key, *, mask, epsilon, block=None, form="copies", fill=None):
    """(token, target, weight) of each slot; slots of each node, its parent, and the denominator."""
    document = places(tokens, weights)
    if block is None:
        return noised(document, 0, key, epsilon, mask), [len(document)], [None], _sum(document)
    while fill is not None and len(document) % block:
        document.append((len(document), fill, document[-1][2]))
    blocks = [document[begin : begin + block] for begin in range(0, len(document), block)]
    slots, sizes, parents, above = [], [], [], None
    for number, part in enumerate(blocks):
        slots += noised(part, number, key, epsilon, mask)
        sizes.append(len(part))
        parents.append(above)
        if form == "prefix":
            above = len(sizes) - 1
        elif number < len(blocks) - 1:
            slots += [(token, -100, 0.0) for _, token, _ in part]
            sizes.append(len(part))
            parents.append(above)
            above = len(sizes) - 1
    return slots, sizes, parents, _sum(document)


def _sum(document):
    return sum(weight for _, _, weight in document)


def seen(sizes, parents):
    """[slots][slots]: whether each slot sees each other."""
    owners = [node for node, size in enumerate(sizes) for _ in range(size)]

    def chain(node):
        found = set()
        while node is not None:
            found.add(node)
            node = parents[node]
        return found

    seen_by = [chain(node) for node in range(len(sizes))]
    return [[key in seen_by[query] for key in owners] for query in owners]


def positions(sizes, parents):
    found = []
    for node, size in enumerate(sizes):
        first, above = 0, parents[node]
        while above is not None:
            first, above = first + sizes[above], parents[above]
        found += range(first, first + size)
    return found
