"""A small model learns to fill in any number of a sum: `python examples/infill_numbers.py`.

Masked diffusion: the text `17+25=42` is read in both directions, with one of its numbers masked,
and the model restores it. Loss weights say which tokens may be masked, here one number of each
document. No order of writing is learned, so the same model adds, subtracts, and completes what
stands in the middle. Learns in a minute or two on two cores, and is tried on sums that were never
trained.
"""

import argparse
from pathlib import Path
from random import Random

from penstock.generation import Sampling, Unmasker

import penstock as ps

MASK = "<|mask|>"
LARGEST = 50
"""Numbers to add are below it."""
HELD_OUT = 250
PLACES = {"first": 1, "second": 4, "sum": 7}
"""Where each number stands in a document, behind BOS; each has two digits."""
Pairs = list[tuple[int, int]]


def main() -> None:
    """Train, and fill in numbers of sums that were never trained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("infill_numbers"))
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    arguments = parser.parse_args()
    pairs = [(a, b) for a in range(LARGEST) for b in range(LARGEST)]
    Random(0).shuffle(pairs)
    data = write_data(arguments.output, pairs[HELD_OUT:])
    run = ps.train(
        ps.build_model(layers=2, width=64, heads=4, vocab_size=data.tokenizer.vocab_size),
        ps.Loader(
            ps.Source(data, objective=ps.MaskedDiffusion(mask_token=MASK)),
            sequence_length=252,
            rows_per_step=2,
        ),
        output=arguments.output / "run",
        steps=arguments.steps,
        warmup_steps=50,
        learning_rate=4e-3,
        threads=arguments.threads,
    )
    for name, right in accuracy(run, pairs[:HELD_OUT]).items():
        print(f"{name}: {right:.0%} of {HELD_OUT} new sums are right")


def text_of(pair: tuple[int, int]) -> str:
    """Such as 07+05=12."""
    first, second = pair
    return f"{first:02}+{second:02}={first + second:02}"


def write_data(folder: Path, pairs: Pairs) -> ps.Dataset:
    """Each sum three times: with a loss weight on each of its numbers, which may then be masked."""
    tokenizer = ps.train_tokenizer(
        map(text_of, pairs), vocab_size=260, output=folder / "tokenizer", special_tokens=[MASK]
    )
    documents = [(ids_of(tokenizer, pair), place) for pair in pairs for place in PLACES.values()]
    return ps.write_dataset(
        folder / "data",
        [ids for ids, _ in documents],
        spans=[[(place, place + 2, 1.0)] for _, place in documents],
        tokenizer=tokenizer,
    )


def ids_of(tokenizer: ps.tokenizers.Tokenizer, pair: tuple[int, int]) -> list[int]:
    """BOS, and a token for each character."""
    return [tokenizer.bos_id, *tokenizer.encode(text_of(pair)).tolist()]


def accuracy(run: ps.Run, pairs: Pairs) -> dict[str, float]:
    """Which share of new sums is completed, by the number that is missing."""
    tokenizer = ps.load_tokenizer(run.tokenizer)
    unmasker = Unmasker(ps.load_model(run.path), tokenizer, context_length=16)
    mask, found = tokenizer.special_tokens[MASK], {}
    texts = [ids_of(tokenizer, pair) for pair in pairs]
    for name, place in PLACES.items():
        masked = [[*ids[:place], mask, mask, *ids[place + 2 :]] for ids in texts]
        filled = unmasker.fill(masked, Sampling(temperature=0))
        found[name] = sum(list(one) == ids for one, ids in zip(filled, texts, strict=True)) / len(
            texts
        )
    return found


if __name__ == "__main__":
    main()
