"""Texts cut at digits, as the step `Digits` of the tokenizers package does before others split the
stretches between.

StarCoder, SmolLM and Command R begin so. A stretch is then split as a text of its own would be: an
encoder that knows only the rest gives the same ids for the stretches. A digit is what that package
takes for one: the numbers of Unicode, also Ⅳ and ½, in its version of Unicode.
"""

import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import final

import numpy as np

from penstock.core.arrays import Bool, Bytes, Int64
from penstock.tokenizers._piece_kernels import cut_at_digits

_PLANES = 0x20000
"""Numbers lie in the first two planes of Unicode; the others hold Chinese characters and tags."""


@final
@dataclass(frozen=True, slots=True)
class DigitCuts:
    """Cuts before and after digits; costs about 1 ns per byte.

    Args: `each`, whether each digit is a stretch of its own, or only each run of digits.
    """

    each: bool

    def cut(self, data: Bytes, offsets: Int64) -> tuple[Int64, Int64]:
        """Cut texts.

        Args:
            data: UTF-8 bytes of all texts.
            offsets: Where each text begins, int64 [texts + 1].

        Returns:
            Where each stretch begins, int64 [stretches + 1], and the number of the first stretch of
            each text, int64 [texts + 1].
        """
        rows = np.zeros(len(offsets), np.int64)
        count = cut_at_digits(data, offsets, digits(), self.each, np.empty(0, np.int64), rows[1:])
        bounds = np.empty(count + 1, np.int64)
        bounds[0] = offsets[0]
        if count:
            cut_at_digits(data, offsets, digits(), self.each, bounds[1:], rows[1:])
        return bounds, rows


@cache
def digits() -> Bool:
    """Whether a code point is a digit for the tokenizers package, bool [code points].

    It is asked about the numbers of Python's Unicode, and about characters that Python does not
    know, since its Unicode may be newer.
    """
    from tokenizers.pre_tokenizers import Digits

    asked = [chr(c) for c in range(_PLANES) if unicodedata.category(chr(c)) in _POSSIBLE]
    # It cuts into runs, in turn without and with digits; "a" makes the first one without.
    runs = Digits(individual_digits=False).pre_tokenize_str("a" + "".join(asked))
    found = np.zeros(_PLANES, np.bool_)
    found[[ord(character) for run, _ in runs[1::2] for character in run]] = True
    return found


_POSSIBLE = ("Nd", "Nl", "No", "Cn")
