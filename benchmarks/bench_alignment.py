"""Time to align two tokenizations, ours against a plain Python walk over bytes, in turn in one
process.

The walk is the obvious one: a list of the bytes of each id, both sides joined token by token until
they are equal. Text that a normaliser changed it cannot align, so for that only ours is timed.
Beside them stand published times of dynamic programming over token strings on such pairs and texts
(`PUBLISHED`); our texts are cut to the student's number of tokens there.

    python benchmarks/bench_alignment.py --tokenizers FOLDER --text FOLDER [--repeats 7] [--json
    FILE]

`--tokenizers` holds gpt2, qwen2.5 and llama (or phi-3-mini, which has Llama 2's vocabulary), each a
folder with a tokenizer.json; they may lie deeper. `--text` holds any of prose, digits, multilingual
and code as NAME.txt; what is missing is made from the standard library, from random numbers, and
from the names of characters.
"""

import random
import unicodedata
from pathlib import Path
from typing import Any

from common import against, arguments, cpu_seconds, standard_library, take_turns
from penstock import load_tokenizer
from penstock.tokenizers import Aligner, Tokenizer
from penstock.tokenizers.alignment_sides import has_byte_table

PUBLISHED = {
    ("gpt2", "qwen2.5", "prose"): (3645, 2387, 0.9),
    ("gpt2", "qwen2.5", "digits"): (4584, 8286, 233.0),
    ("llama", "qwen2.5", "prose"): (2865, 2387, 0.5),
    ("gpt2", "llama", "code"): (5511, 2716, 1.9),
    ("llama", "qwen2.5", "multilingual"): (3082, 2240, 33.0),
    ("gpt2", "qwen2.5", "NFD"): (3645, 2387, 0.0),
}
"""Student, teacher, text → tokens of both, and seconds of the dynamic programming; 0: none was
published.

Source: NeMo-RL's token aligner (main, July 2026) on two CPU cores.
"""
ALIASES = {
    "llama": ("llama", "phi-3-mini", "llama-2"),
    "qwen2.5": ("qwen2.5", "qwen2"),
    "gpt2": ("gpt2",),
}
CALLS = 20
"""Alignments in one turn."""


def find_tokenizer(folder: Path, name: str) -> Tokenizer:
    """The tokenizer of that name at or below `folder`."""
    for alias in ALIASES[name]:
        for found in [folder / alias, *sorted(folder.glob(f"*/{alias}"))]:
            if found.is_dir():
                return load_tokenizer(found)
    raise SystemExit(f"{folder}: no folder {' or '.join(ALIASES[name])} there")


def make_text(name: str) -> str:
    """A text of a kind."""
    numbers = random.Random(0)
    if name == "digits":
        return "\n".join(str(numbers.randrange(10**5, 10**12)) for _ in range(2000))
    if name in ("multilingual", "NFD"):
        scripts = (
            (0x400, 0x450),
            (0x3B1, 0x3CA),
            (0x5D0, 0x5EB),
            (0x620, 0x64B),
            (0x905, 0x93A),
            (0x3041, 0x3097),
        )
        ranges = [*scripts, (0x4E00, 0x5500), (0xAC00, 0xB000), (0xE0, 0xFF)]
        words = (numbers.choice(ranges) for _ in range(4000))
        return " ".join(
            "".join(chr(numbers.randrange(*word)) for _ in range(numbers.randint(1, 7)))
            for word in words
        )
    source = "\n".join(standard_library(1_500_000))
    if name == "code":
        return source
    lines = [line.strip(" #\"'") for line in source.splitlines()]
    return "\n".join(line for line in lines if line.count(" ") > 6 and line[:1].isupper())


def plain_walk(
    left: list[bytes], right: list[bytes], a: list[int], b: list[int], spaced: tuple[bool, bool]
) -> Any:
    """Ranges of tokens with equal bytes; None where they differ."""
    chunks = []
    i = j = 0
    while i < len(a) and j < len(b):
        x, y, first_i, first_j = left[a[i]], right[b[j]], i, j
        if i == 0 and spaced[0]:
            x = x[1:]
        if j == 0 and spaced[1]:
            y = y[1:]
        i, j = i + 1, j + 1
        while x != y:
            if len(x) < len(y):
                if i == len(a) or not y.startswith(x):
                    return None
                x += left[a[i]]
                i += 1
            else:
                if j == len(b) or not x.startswith(y):
                    return None
                y += right[b[j]]
                j += 1
        chunks.append((first_i, i, first_j, j))
    return chunks


def measure(
    text: str, students: Tokenizer, teachers: Tokenizer, tokens: int, repeats: int
) -> dict[str, Any]:
    """Seconds of one alignment in either way, the student's tokens cut to `tokens` first."""
    cut = students.decode(students.encode(text)[:tokens])
    text = cut[: cut.rfind("\n") + 1] or cut
    a, b = students.encode(text), teachers.encode(text)
    tables = [[one.byte_table[k] for k in range(one.vocab_size)] for one in (students, teachers)]
    aligner = Aligner(students, teachers)
    found = aligner.align(a, b)
    ids, spaced = (a.tolist(), b.tolist()), (students.adds_space, teachers.adds_space)

    def ours() -> None:
        for _ in range(CALLS):
            aligner.align(a, b)

    def plain() -> None:
        for _ in range(CALLS):
            plain_walk(*tables, *ids, spaced)

    walked = plain_walk(*tables, *ids, spaced)
    rivals = {"ours": lambda: cpu_seconds(ours)}
    if walked is not None:
        assert [row[:2] for row in walked] == [tuple(row) for row in found.student_bounds.tolist()]
        rivals["plain"] = lambda: cpu_seconds(plain)
    seconds = {name: spent / CALLS for name, spent in take_turns(rivals, repeats).items()}
    return {
        "tokens": [len(a), len(b)],
        "coverage": found.coverage,
        "method": found.method,
        "seconds": seconds,
        "ratio": seconds["plain"] / seconds["ours"] if "plain" in seconds else None,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokenizers", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--text", type=Path, metavar="FOLDER", help="with prose.txt, digits.txt, …")
    options = parser.parse_args()
    loaded = {name: find_tokenizer(options.tokenizers, name) for name in ALIASES}
    assert all(has_byte_table(one) for one in loaded.values())
    rows = []
    for (student, teacher, kind), (tokens, _, published) in PUBLISHED.items():
        file = (
            options.text / f"{'multilingual' if kind == 'NFD' else kind}.txt"
            if options.text
            else None
        )
        text = (
            file.read_text(encoding="utf-8")
            if file is not None and file.is_file()
            else make_text(kind)
        )
        if kind == "NFD":
            text = unicodedata.normalize("NFD", text)
        found = measure(text, loaded[student], loaded[teacher], tokens, options.repeats)
        rows.append(
            {
                "pair": f"{student} → {teacher}",
                "text": kind,
                "published_seconds": published or None,
                **found,
            }
        )
        if "plain" in found["seconds"]:
            work = f"aligning {kind}, {student} and {teacher}"
            times = {"ours": found["seconds"]["ours"], "theirs": found["seconds"]["plain"]}
            against("Chats and tokenizers", work, "a plain Python walk over bytes", **times)
    print(
        f"{'pair':17} {'text':13} {'tokens':>11} {'in chunks':>9} {'ours':>9} {'plain':>9} "
        f"{'ratio':>6}  published"
    )
    for row in rows:
        spent = {name: f"{1e6 * value:,.0f} µs" for name, value in row["seconds"].items()}
        times = f"{row['ratio']:.1f} x" if row["ratio"] else "–"
        other = row["published_seconds"]
        beside = f"{other:g} s ({other / row['seconds']['ours']:,.0f} x ours)" if other else "–"
        sizes = "{}:{}".format(*row["tokens"])
        print(
            f"{row['pair']:17} {row['text']:13} {sizes:>11} {row['coverage']:9.4f} "
            f"{spent['ours']:>9} {spent.get('plain', '–'):>9} {times:>6}  {beside}"
        )


if __name__ == "__main__":
    main()
