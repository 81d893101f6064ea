"""Denoising written out slowly from its definition: Fractions and lists, one token at a time."""

import itertools
from fractions import Fraction


def philox(block, purpose, key):
    c0, c1, c2, c3, k0, k1 = block, purpose, 0, 0, key % 2**32, key >> 32
    for _ in range(10):
        high1, low1 = divmod(c0 * 0xD2511F53, 1 << 32)
        high2, low2 = divmod(c2 * 0xCD9E8D57, 1 << 32)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high1 ^ c3 ^ k1, low1
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return c0, c1, c2, c3


def word(i, purpose, key):
    return philox(i // 4, purpose, key)[i % 4]


def count_noise(length, rate, mean):
    """The published rounding, in exact arithmetic; Python's round of a Fraction goes half to
    even.
    """
    noise = min(max(round(length * Fraction(rate)), 1), length - 1)
    spans = max(round(noise / Fraction(mean)), 1)
    return noise, min(spans, noise, length - noise)


def compose(total, parts, purpose, key):
    cuts = parts - 1
    chosen = set()
    for i in range(cuts):
        last = total - 1 - cuts + i
        drawn = word(i, purpose, key) * (last + 1) >> 32
        chosen.add(last if drawn in chosen else drawn)
    edges = [0, *(gap + 1 for gap in sorted(chosen)), total]
    return [end - begin for begin, end in itertools.pairwise(edges)]


def circle(length, rate, mean, key):
    """The mask before it is rolled."""
    noise, spans = count_noise(length, rate, mean)
    kept_parts = compose(length - noise, spans, 1, key)
    noise_parts = compose(noise, spans, 2, key)
    mask = []
    for kept, masked in zip(kept_parts, noise_parts, strict=True):
        mask += [False] * kept + [True] * masked
    return mask


def roll(mask, offset):
    length, noise = len(mask), sum(mask)
    spans = sum(mask[i] and not mask[i - 1] for i in range(length))
    inside = [c for c in range(1, length) if mask[c - 1] and mask[c]]
    others = [c for c in range(1, length + 1) if c not in set(inside)]
    assert len(inside) == noise - spans
    cut = inside[offset] if offset < len(inside) else others[offset - len(inside)]
    return [mask[(i + cut) % length] for i in range(length)]


def runs(mask):
    """(begin, end) of each run of True."""
    edges = [
        i for i in range(len(mask) + 1) if (i > 0 and mask[i - 1]) != (i < len(mask) and mask[i])
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))


def pick(cumulative, key):
    return next(t for t, end in enumerate(cumulative) if word(0, 0, key) < end)


def write(settings, tokens, weights, key):
    """Tokens, weights, prefix, place of the bar, spans, and the number of the task.

    `settings`: a dict with tasks (dicts), cumulative, roll, final, input_end, bidirectional,
    inputs_too, sentinels.
    """
    number = pick(settings["cumulative"], key)
    task, length = settings["tasks"][number], len(tokens)
    mode = [] if task["mode"] is None else [(task["mode"], 0.0)]
    both = settings["inputs_too"]
    words = list(zip(tokens, [1.0] * length if weights is None else weights, strict=True))
    if task["kind"] == "causal":
        return *finish(mode + words), 0, len(mode), [], number
    inputs, targets, mask = list(mode), [], None
    if length < 2:
        inputs += [(t, w if both else 0.0) for t, w in words]
        spans = []
    elif task["kind"] == "prefix":
        if task["rate"] is None:
            pivot = 1 + (word(1, 0, key) * (length - 1) >> 32)
        else:
            pivot = length - min(max(round(length * Fraction(task["rate"])), 1), length - 1)
        spans = [(pivot, length)]
        used = int(task["sentinel"])
    else:
        mask = circle(length, task["rate"], task["mean"], key)
        if settings["roll"]:
            mask = roll(mask, word(1, 0, key) * length >> 32)
        spans = runs(mask)
        used = len(spans)
    if length >= 2:
        heaviest = [max(w for _, w in words[b:e]) for b, e in spans]
        behind = 0
        for s, (begin, end) in enumerate(spans):
            inputs += [(t, w if both else 0.0) for t, w in words[behind:begin]]
            if task["kind"] == "spans":
                inputs.append((settings["sentinels"][s], heaviest[s] if both else 0.0))
            if task["kind"] == "spans" or task["sentinel"]:
                targets.append((settings["sentinels"][s], heaviest[s]))
            targets += words[begin:end]
            behind = end
        inputs += [(t, w if both else 0.0) for t, w in words[behind:]]
        if settings["input_end"] is not None:
            inputs.append((settings["input_end"], max(heaviest) if both else 0.0))
        if settings["final"]:
            targets.append((settings["sentinels"][used], max(heaviest)))
    prefix = len(inputs) if settings["bidirectional"] else 0
    return *finish(inputs + targets), prefix, len(inputs), spans, number


def finish(pairs):
    return [t for t, _ in pairs], [w for _, w in pairs]
