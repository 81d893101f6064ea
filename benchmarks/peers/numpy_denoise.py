"""T5's span corruption and prefix language modelling in NumPy, one document a call: the reference
to be faster than.

Written from the description of `random_spans_noise_mask` (Raffel et al. 2020): both token counts
are cut into spans by shuffling a row of booleans, spans are interleaved, and the mask decides what
is input and what is target.
"""

from collections.abc import Callable, Sequence

import numpy as np

TASKS = ((0.15, 3.0, 59_997), (0.15, 32.0, 59_998), (0.5, 3.0, 59_998), (0.0, 0.0, 59_999))
WEIGHTS = (0.25, 0.125, 0.125, 0.5)


def segment_lengths(total: int, parts: int, random: np.random.Generator) -> np.ndarray:
    """A random composition of `total`, int64 [parts]."""
    begins = np.arange(total - 1) < parts - 1
    random.shuffle(begins)
    return np.bincount(np.cumsum(np.concatenate(([False], begins))), minlength=parts)


def noise_mask(length: int, rate: float, mean: float, random: np.random.Generator) -> np.ndarray:
    """Which tokens are noise, bool [length]."""
    noise = min(max(round(length * rate), 1), length - 1)
    spans = max(round(noise / mean), 1)
    masked, kept = (
        segment_lengths(noise, spans, random),
        segment_lengths(length - noise, spans, random),
    )
    starts = np.cumsum(np.stack([kept, masked], axis=1).reshape(-1))[:-1]
    begins = np.zeros(length, np.int64)
    begins[starts] = 1
    return np.roll(np.cumsum(begins) % 2 == 1, random.integers(0, length))


def sentinels_for(tokens: np.ndarray, mask: np.ndarray, sentinels: np.ndarray) -> np.ndarray:
    """The tokens with each run of the mask replaced by one sentinel."""
    after = np.concatenate(([False], mask[:-1]))
    first = mask & ~after
    marked = np.where(first, sentinels[np.maximum(np.cumsum(first) - 1, 0)], tokens)
    return marked[~(mask & after)]


def denoise(
    tokens: np.ndarray, task: int, sentinels: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Mode token, inputs, targets."""
    rate, mean, mode = TASKS[task]
    if len(tokens) < 2:
        return np.concatenate(([mode], tokens))
    if rate == 0:
        pivot = random.integers(1, len(tokens))
        return np.concatenate(([mode], tokens[:pivot], sentinels[:1], tokens[pivot:]))
    mask = noise_mask(len(tokens), rate, mean, random)
    inputs = sentinels_for(tokens, mask, sentinels)
    return np.concatenate(([mode], inputs, sentinels_for(tokens, ~mask, sentinels)))


def numpy_denoiser(documents: Sequence[np.ndarray], sentinels: Sequence[int]) -> Callable[[], None]:
    """Work that denoises each document."""
    random, ids = np.random.default_rng(0), np.array(sentinels)
    tasks = random.choice(len(TASKS), len(documents), p=WEIGHTS).tolist()

    def work() -> None:
        for document, task in zip(documents, tasks, strict=True):
            denoise(document, task, ids, random)

    return work
