"""Text is cut exactly as by the tokenizers package: every step, and the patterns of published
vocabularies.
"""

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers.decoders import Replace
from tokenizers.pre_tokenizers import Punctuation, WhitespaceSplit

import tokenizers
from penstock.core.errors import TokenizerError
from penstock.tokenizers import character_sets
from penstock.tokenizers.fast import text_buffers
from penstock.tokenizers.piece_cache import frozen
from penstock.tokenizers.spelling import spell_as_characters
from penstock.tokenizers.split_automaton import compile_split
from penstock.tokenizers.split_patterns import (
    CL100K_PATTERN,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    O200K_PATTERN,
    QWEN2_PATTERN,
    TEKKEN_PATTERN,
)
from penstock.tokenizers.split_regex import _DOUBLES, _FOLDS, read_pattern
from penstock.tokenizers.splitter import Splitter
from tokenizers import Regex

LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PLAIN = {**LEVEL, "use_regex": False}
LETTERS = [*"abcdsStTmreVlLkKxzZ", "ſ", "K", "ß", "é", "ǅ", "ʰ", "İ", "Ж", "水", "一", "ゞ"]
SPACES = [" ", "  ", "\n", "\r\n", "\t", "\x85", "\u2028", "\u3000", "\xa0", " \n \n ", "\x0b"]
DIGITS = [*"1290", "22", "345", "6789", "٣", "½", "Ⅳ", "²", "৪"]
MARKS = [*"()|.,!_/-'$^`+\"#", "…", "。", "،", "’", "«"]
ODD = [
    "\u0301",
    "\u0308",
    "\u093f",
    "🤦🏼\u200d♂️",
    "\x00",
    "\x1f",
    "\U00050000",
    "\U000e0041",
    "\U000f0000",
    "\U0010ffff",
    "\ufeff",
    "\ufffd",
    "\ud7ff",
    "\ue000",
]
WORDS = ["'s", "'LL", "'ſ", "don't", "Hello", "abcd", "HTTPServer", "ab", "abc"]
PARTS = st.sampled_from([*LETTERS, *SPACES, *DIGITS, *MARKS, *ODD, *WORDS])
TEXTS = st.lists(
    st.lists(st.one_of(PARTS, PARTS, PARTS, st.characters(codec="utf-8")), max_size=25).map(
        "".join
    ),
    max_size=5,
)


def _steps(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(
    pattern: str, behavior: str = "Isolated", *, invert: bool = False, kind: str = "Regex"
) -> dict[str, Any]:
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def _digits(each: bool) -> dict[str, Any]:
    return {"type": "Digits", "individual_digits": each}


BEHAVIORS = ("Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext")
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ).replace(r"\r\n", "\r\n"),
)
PUBLISHED = {
    "gpt2": _steps(LEVEL),
    "gpt2 of tiktoken": _steps(_split(GPT2_PATTERN), PLAIN),
    "cl100k": _steps(_split(CL100K_PATTERN), PLAIN),
    "claude": _steps(_split(CL100K_PATTERN, "Removed", invert=True), PLAIN),
    "llama3": _steps(_split(LLAMA3_PATTERN), PLAIN),
    "qwen2": _steps(_split(QWEN2_PATTERN), PLAIN),
    "o200k": _steps(_split(O200K_PATTERN), PLAIN),
    "tekken": _steps(_split(TEKKEN_PATTERN), PLAIN),
    "nanochat": _steps(_split(LLAMA3_PATTERN.replace("{1,3}", "{1,2}")), PLAIN),
    "deepseek": _steps(*map(_split, DEEPSEEK), PLAIN),
    "bloom": _steps(_split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), PLAIN),
    "starcoder": _steps(_digits(True), LEVEL),
    "falcon": _steps(
        {"type": "Punctuation", "behavior": "Contiguous"},
        LEVEL,
        _digits(False),
        _split("[0-9][0-9][0-9]"),
    ),
}
STEPS = {
    **{
        f"{behavior} {invert}": _steps(_split(r"\s|\p{L}\p{N}|'", behavior, invert=invert), PLAIN)
        for behavior in BEHAVIORS
        for invert in (False, True)
    },
    **{
        f"Punctuation {behavior}": _steps(
            {"type": "Punctuation", "behavior": behavior},
            PLAIN,
            {"type": "Punctuation", "behavior": behavior},
        )
        for behavior in BEHAVIORS
    },
    "runs of digits, before and after": _steps(_digits(False), PLAIN, _digits(False)),
    "each digit, before and after": _steps(_digits(True), PLAIN, _digits(True)),
    "WhitespaceSplit": _steps({"type": "WhitespaceSplit"}, PLAIN),
    "Whitespace": _steps({"type": "Whitespace"}, PLAIN, {"type": "Whitespace"}),
    "a text": _steps(
        _split(" .", kind="String"), _split("ab", "MergedWithNext", kind="String"), PLAIN
    ),
    "after the bytes": _steps(PLAIN, _split(r"Ġ?\p{L}+|\p{N}+"), _split(r"\p{P}", "Removed")),
}  # fmt: skip
REGEXES = {
    "lazy": r"\p{L}+?\p{N}|a{2,3}?b|x??y",
    "first alternative": r"(?:ab|a)(?:c|bcd)|(a|ab)(bc|)d",
    "ahead": r"x(?=\s|$)|z(?!\z)|a(?=[bc])|\s(?!\p{L}|\d)",
    "intervals": r"\d{,2}x|\d{3}+|a{2}b{1,}|\p{L}{2,4}|(?:ab){1,2}c",
    "atomic": r"(?>\s+)\n|(?>a?)b|\s++$|\p{L}*+1|x?+y",
    "line ends": r"a$|\n+|.+",
    "no case": r"(?i:'s|t[mre]|k)|(?i:ab)c|(?:(?i:l)l)+|(?i:z)?x",
    "escapes": r"\x41|\x{6C34}|\u4e00|\t|\h{2}|\W\w|\P{L}\p{^N}|[\w&&[^a-d]]+|[[:alpha:]]+\.|\-",
    "nested": r"((?:a|(?:b|c)d?)+|x+)\s*",
}


def _theirs(pre_tokenizer: dict[str, Any]) -> Any:
    content = {"version": "1.0", "pre_tokenizer": pre_tokenizer, "added_tokens": []}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    encoder = tokenizers.Tokenizer.from_str(json.dumps({**content, "model": model}))
    return encoder.pre_tokenizer


def _cut(splitter: Splitter, texts: Sequence[str]) -> list[list[str]]:
    """The pieces of texts as byte-level characters, cut to the end."""
    data, offsets = text_buffers(pa.array(texts, pa.large_string()))
    data = frozen(data)
    pieces = splitter.cut(data, offsets)
    rows = pieces.rows
    if splitter.cut_words is not None:
        later = splitter.cut_words(data, pieces.places)
        pieces, rows = later, later.rows[rows]
    found = [spell_as_characters(bytes(data[begin:end])) for begin, end in pieces.places.T.tolist()]
    return [found[low:high] for low, high in pairwise(rows)]


def _check(splitter: Splitter, theirs: Any, texts: Sequence[str]) -> None:
    expected = [[piece for piece, _ in theirs.pre_tokenize_str(text)] for text in texts]
    assert _cut(splitter, texts) == expected


CASES = {**PUBLISHED, **STEPS, **{n: _steps(_split(p), PLAIN) for n, p in REGEXES.items()}}


@pytest.fixture(scope="module", params=list(CASES))
def both(request: pytest.FixtureRequest) -> tuple[Splitter, Any]:
    return Splitter(CASES[request.param]), _theirs(CASES[request.param])


@settings(max_examples=80, deadline=None)
@given(texts=TEXTS)
@example(texts=["", " ", "\n", "a\n", "don't  12345 \n\n x\r\n\r\n", "  ", "水水12ab"])
def test_pieces_are_those_of_the_package(both: tuple[Splitter, Any], texts: list[str]) -> None:
    _check(*both, texts)


def test_pieces_of_every_character_are_those_of_the_package(both: tuple[Splitter, Any]) -> None:
    """Each in two surroundings, in an order that tells nothing."""
    stretches = ((0, 0x3000), (0xA000, 0xAC80), (0xF900, 0x10000), (0x1D000, 0x1FB00))
    codes = [code for low, high in stretches for code in range(low, high)]
    drawn = random.Random(7).sample(codes, 3000)
    texts = ["".join(f"{chr(code)}a1{chr(code)} " for code in drawn[at::60]) for at in range(60)]
    _check(*both, texts)


@pytest.mark.parametrize(
    "pattern",
    [r"\p{L}", r"\p{N}", r"\s", r"\w", r"[^\r\n\p{L}\p{N}]", r"\p{M}", r"[\p{P}\p{S}]", r"\p{Lm}"],
)
def test_sets_are_right_for_every_code_point(pattern: str) -> None:
    classes = compile_split(read_pattern(f"{pattern}")).classes
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    kept = Replace(Regex(f"(?:{pattern})+"), "").decode([every])
    expected = np.ones(0x110000, np.bool_)
    expected[[ord(character) for character in kept]] = False
    found = classes == classes[ord(next(c for c in every if expected[ord(c)]))]
    sound = np.r_[0:0xD800, 0xE000:0x110000]
    assert np.array_equal(found[sound], expected[sound])


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (Punctuation("removed"), character_sets.punctuation),
        (WhitespaceSplit(), character_sets.white_space),
    ],
)
def test_sets_of_steps_are_right_for_every_character(step: Any, found: Any) -> None:
    codes = character_sets.asked()
    removed = np.ones(len(codes), np.bool_)
    for _, (begin, end) in step.pre_tokenize_str("".join(map(chr, codes.tolist()))):
        removed[begin:end] = False
    assert np.array_equal(removed, found())


def test_case_is_ignored_as_the_package_ignores_it() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    asked = character_sets.asked()
    for letter in letters:
        found = asked[character_sets.matching(f"(?i:{letter})")]
        assert "".join(map(chr, found)) == letter.upper() + letter + _FOLDS.get(letter, "")
    beyond = "".join(map(chr, asked[asked >= 0x80].tolist()))
    pairs = {a + b for a in letters for b in letters}
    others = "|".join(sorted(pairs - set(_DOUBLES)))
    assert Replace(Regex(f"(?i:{others})"), "").decode([beyond]) == beyond
    for pair in _DOUBLES:
        assert len(Replace(Regex(f"(?i:{pair})"), "").decode([beyond])) < len(beyond)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"a*", "may match nothing"),
        (r"(?=a)", "may match nothing"),
        (r"(?<=a)b", r"the group '\(\?<='"),
        (r"(?i)a", r"the group '\(\?i\)'"),
        (r"^a", r"'\^' at character 0"),
        (r"a\b", r"the escape \\b"),
        (r"(a)\1", r"the escape \\1"),
        (r"a(?=bc)", "a look at more than one character"),
        (r"(?:ab)++", "a possessive quantifier of more than one set"),
        (r"(?>ab|a)c", "an atomic group"),
        (r"(?:a?)+b", "a repeated part that may match nothing"),
        (r"a{2}?", r"a fixed number and \?"),
        (r"a+*", "a quantifier after a quantifier"),
        (r"a{1000}", "the quantifier"),
        (r"a{", "'{'"),
        (r"(a", "an unmatched parenthesis"),
        (r"a)", "an unmatched parenthesis"),
        (r"[a", "a set without an end"),
        (r"[]a]", "begins with ]"),
        (r"(?i:ss)", "letters that together match one character"),
        (r"(?i:s)(?i:t)", "letters that together match one character"),
        (r"(?i:é)", "case to be ignored beyond ASCII"),
        (r"(?i:[^a])", "without regard to case"),
        (r"(?i:\w)", "without regard to case"),
        ("[\U00040000-\U00040010]", "a rare character"),
        (r"\p{Nonsense}", "cannot read"),
        (r"(?:(?:[ab]*a[ab]{12}c)|x)", "states"),
    ],
)
def test_other_patterns_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(TokenizerError, match=reason):
        Splitter(_steps(_split(pattern), PLAIN))


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (None, "no step ByteLevel"),
        (_steps(LEVEL, PLAIN), "two steps ByteLevel"),
        (_steps({**LEVEL, "add_prefix_space": True}), "a space before"),
        (_steps({"type": "Metaspace"}, LEVEL), "the step Metaspace"),
        (_steps(_split("", kind="String"), PLAIN), "an empty text"),
    ],
)
def test_other_steps_are_refused(step: Any, reason: str) -> None:
    with pytest.raises(TokenizerError, match=reason):
        Splitter(step)
