"""Sets of characters, asked of the tokenizers package, so that its version of Unicode decides.

A set is a bool array over `ASKED`: all code points that have, or will soon have, properties of
their own, and one for each stretch of others. The package's decoder `Replace` removes text by a
regular expression without the tables of positions that its other parts make: 10 to 25 ms a set.
"""

import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
from tokenizers.decoders import Replace
from tokenizers.pre_tokenizers import Punctuation, Whitespace, WhitespaceSplit

from penstock.core.arrays import Array, Bool
from penstock.core.errors import TokenizerError
from penstock.tokenizers.digits import digits
from tokenizers import Regex

CHARACTERS = 0x110000
UNIFORM = 0x34000
"""From here on no character has properties of its own, except tags, noncharacters and those for
private use.
"""
_SURROGATES = range(0xD800, 0xE000)
_TAGS = range(0xE0000, 0xE1001)
_PLANE = 0x10000


@cache
def asked() -> Array:
    """Code points in order, uint32 [asked]; each stands for those up to the next one."""
    edges = [plane + low for plane in range(0x30000, CHARACTERS, _PLANE) for low in (0, 0xFFFE)]
    edges += [edge + 1 for edge in edges if edge & 1 == 0 and edge & 0xFFFF]
    points = {UNIFORM, *(edge for edge in edges if edge > UNIFORM), *_TAGS}
    low = [np.arange(_SURROGATES.start), np.arange(_SURROGATES.stop, UNIFORM)]
    return np.concatenate([*low, np.array(sorted(points))]).astype(np.uint32)


@lru_cache(maxsize=64)
def matching(pattern: str) -> Bool:
    """The characters that match a regular expression of one character, bool [asked].

    Raises:
        TokenizerError: The tokenizers package cannot read the expression.
    """
    try:
        replace = Replace(Regex(f"(?:{pattern})+"), "")
    except Exception as error:
        raise TokenizerError(f"the tokenizers package cannot read {pattern!r}: {error}") from error
    points = asked()
    kept = replace.decode([points.tobytes().decode("utf-32-le")])
    found = np.ones(len(points), np.bool_)
    found[np.searchsorted(points, np.frombuffer(kept.encode("utf-32-le"), np.uint32))] = False
    return found


def one_of(characters: Sequence[int]) -> Bool:
    """The characters with these code points, bool [asked]."""
    return np.isin(asked(), np.array(characters, np.uint32))


@cache
def numbers() -> Bool:
    """The digits of the step `Digits`, bool [asked]."""
    known = digits()
    found = np.zeros(len(asked()), np.bool_)
    inside = asked() < len(known)
    found[inside] = known[asked()[inside]]
    return found


@cache
def punctuation() -> Bool:
    """The characters of the step `Punctuation`, bool [asked]; takes 0.2 s."""
    return _removed_by(Punctuation("removed"), 2 * _PLANE, ("Lo", "Co"))


@cache
def white_space() -> Bool:
    """The characters of the step `WhitespaceSplit`, bool [asked]."""
    return _removed_by(WhitespaceSplit(), _PLANE, ("Lo", "Co", "So", "Ll", "Lu", "Cn"))


@cache
def words_and_others() -> tuple[Bool, Bool]:
    """The characters of words for the step `Whitespace`, and those that are neither of words nor
    white space, each bool [asked]; takes 0.7 s.

    It does not say which of its pieces are words: "a" before one shows it.
    """
    step, points = Whitespace(), asked()
    words, others = np.zeros((2, len(points)), np.bool_)
    text = points.tobytes().decode("utf-32-le")
    for piece, (begin, end) in step.pre_tokenize_str(text):
        is_word = len(step.pre_tokenize_str(f"a{piece[0]}")) == 1
        (words if is_word else others)[begin:end] = True
    return words, others


def _removed_by(step: object, end: int, never: Sequence[str]) -> Bool:
    """The characters that a step of the package removes.

    Args:
        step: The step.
        end: It removes none from here on.
        never: Categories of characters that it leaves, which are not asked, because a character
            takes it 2 µs.
    """
    possible = np.array(
        [code for code in range(end) if _may_be(code, never)],
        np.uint32,
    )
    text = possible.tobytes().decode("utf-32-le")
    found = np.zeros(len(asked()), np.bool_)
    removed = np.ones(len(possible), np.bool_)
    for _, (begin, stop) in step.pre_tokenize_str(text):  # type: ignore[attr-defined]
        removed[begin:stop] = False
    found[np.searchsorted(asked(), possible[removed])] = True
    return found


def _may_be(code: int, never: Sequence[str]) -> bool:
    return code not in _SURROGATES and unicodedata.category(chr(code)) not in never


def partition(sets: Sequence[Bool]) -> tuple[Array, Bool]:
    """The classes of characters that no set tells apart.

    Returns:
        The class of each character, uint8 [0x110000], from 1 on; and whether the characters of a
        class belong to a set, bool [1 + classes, sets], of class 0 False.

    Raises:
        TokenizerError: There are more than 250 classes.
    """
    count = len(asked())
    classes = np.zeros(count, np.int64)
    members = np.zeros((1, 0), np.bool_)
    for one in sets:
        doubled = 2 * classes + one
        present = np.bincount(doubled, minlength=2 * len(members)) > 0
        members = np.column_stack([np.repeat(members, 2, 0), np.arange(len(present)) % 2 == 1])
        classes, members = (np.cumsum(present) - 1)[doubled], members[present]
    if len(members) > 250:
        raise TokenizerError(f"its pattern tells {len(members)} classes of characters apart")
    ends = np.append(asked()[1:], CHARACTERS).astype(np.int64)
    lengths = ends - asked().astype(np.int64)
    none = np.zeros((1, members.shape[1]), np.bool_)
    return np.repeat((classes + 1).astype(np.uint8), lengths), np.concatenate([none, members])
