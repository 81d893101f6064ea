"""Pieces and merges of our own kernels against the `tokenizers` package, also where its rules are
peculiar.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import tokenizer_texts
from tokenizers.pre_tokenizers import Split

from penstock import train_tokenizer
from penstock.tokenizers import training
from penstock.tokenizers.merges import PieceCounts
from tokenizers import Regex

TRICKY = "' stmdrevlSTMDREVLſKx10a\n\r\t \u00a0\u2028\x85é水𝟘"
RUNS = "aab- "
"""Runs of the same character give ids that two different pairs spell."""


def piece_counts(texts: list[str]) -> dict[str, int]:
    counted = PieceCounts()
    counted.add([text.encode() for text in texts])
    data, edges = counted.words.tobytes(), counted.offsets
    pieces = [data[edges[at] : edges[at + 1]].decode() for at in range(counted.size)]
    assert len(set(pieces)) == counted.size
    return dict(zip(pieces, counted.counts.tolist(), strict=True))


def slow_piece_counts(texts: list[str]) -> dict[str, int]:
    split = Split(Regex(training.SPLIT_PATTERN), "isolated")
    return dict(Counter(piece for text in texts for piece, _ in split.pre_tokenize_str(text)))


def model(texts: list[str], controls: list[str], vocab_size: int) -> str:
    counted = PieceCounts()
    counted.add([text.encode() for text in texts])
    return str(training._train(counted, controls, vocab_size).to_str())


def slow_model(texts: list[str], controls: list[str], vocab_size: int) -> str:
    return str(
        training._train_small([text.encode() for text in texts], controls, vocab_size).to_str()
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(TRICKY, max_size=40) | st.text(max_size=20), max_size=6))
@example(["don'T 'lL I'Ve''re 's\u017f '\u017f", "x", ""])
@example([" \r\n \n  a", "  ", " \t\n", "a  b", "1\n\n\n", " !?\r\n\nx", "\u2028\u2028a"])
def test_pieces_are_those_of_the_pattern(texts: list[str]) -> None:
    assert piece_counts(texts) == slow_piece_counts(texts)


@pytest.mark.parametrize(
    "end",
    [0x3000, pytest.param(0x110000, marks=pytest.mark.slow)],
    ids=["to U+2FFF", "all of Unicode"],
)
def test_characters_have_the_classes_of_the_pattern(end: int) -> None:
    for begin in range(0, end, 0x1000):
        if 0x40000 <= begin < 0xE0000 and begin % 0x10000:
            continue  # of planes without characters, the beginnings are enough
        characters = [
            chr(code) for code in range(begin, begin + 0x1000) if not 0xD800 <= code < 0xE000
        ]
        texts = ["".join(f"'{c}'{c}s  {c}{c} {c}\n{c}9{c}a\r{c}'s{c}" for c in characters)]
        assert piece_counts(texts) == slow_piece_counts(texts), hex(begin)


def test_many_pieces_in_several_batches() -> None:
    numbers = np.random.default_rng(0).integers(0, 26, (120_000, 4))
    words = ["".join(chr(97 + letter) for letter in row) for row in numbers.tolist()]
    counted, expected = PieceCounts(), Counter(" " + word for word in words)
    for begin in range(0, len(words), 30_000):
        counted.add([f" {word}".encode() for word in words[begin : begin + 30_000]])
    data, edges = counted.words.tobytes(), counted.offsets
    assert counted.size == len(expected) > 1 << 16
    for at, count in enumerate(counted.counts.tolist()):
        assert expected[data[edges[at] : edges[at + 1]].decode()] == count


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.text(RUNS, min_size=1, max_size=120), min_size=1, max_size=8),
    st.sampled_from([[], ["a", "aa"], ["ab", "Ġab", "b", "水"]]),
    st.sampled_from([0, 1, 7, 60, 2000]),
)
def test_merges_are_those_of_the_tokenizers_package(
    texts: list[str], controls: list[str], num_merges: int
) -> None:
    vocab_size = 256 + len(controls) + num_merges
    assert model(texts, controls, vocab_size) == slow_model(texts, controls, vocab_size)


def test_merges_of_source_code() -> None:
    texts = [path.read_text() for path in sorted(Path(training.__file__).parent.glob("*.py"))]
    for vocab_size in (259, 2000, 50_000):
        assert model(texts, ["<|bos|>"], vocab_size) == slow_model(texts, ["<|bos|>"], vocab_size)


def test_large_and_small_texts_give_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tokenizer_texts()
    files = []
    for batch_bytes in (1 << 20, 100):
        monkeypatch.setattr(training, "BATCH_BYTES", batch_bytes)
        folder = tmp_path / str(batch_bytes)
        train_tokenizer(
            iter(texts), vocab_size=400, output=folder, special_tokens=["<|x|>"], progress=False
        )
        files.append(
            [(folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")]
        )
        monkeypatch.setattr(training, "_train_small", None)
    assert files[0] == files[1]
