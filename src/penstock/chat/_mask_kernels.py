"""Compiled painting of weights: strokes on characters, and what that makes of tokens."""

from penstock.compiled import kernel


@kernel
def paint(begins, ends, values, canvas):
    """Set canvas[begins[i]:ends[i]] to values[i], stroke after stroke; all of one length, begins and ends int64."""
    for stroke in range(len(begins)):
        value = values[stroke]
        for place in range(begins[stroke], ends[stroke]):
            canvas[place] = value


@kernel
def weigh_tokens(begins, ends, characters, owners, weights, straddling, token_owners):
    """Each token gets the weight of its last character, and the owner of its first.

    Args:
        begins, ends: Characters of each token, int64 [tokens].
        characters, owners: float32 and int32 [characters].
        weights: float32 [tokens], written; 0 for a token without characters.
        straddling: bool [tokens], written: whether its characters have different weights.
        token_owners: int64 [tokens], written; −1 for a token without characters.
    """
    for token in range(len(begins)):
        begin, end = begins[token], ends[token]
        weights[token], straddling[token], token_owners[token] = 0, False, -1
        if begin < end:
            weight = characters[end - 1]
            weights[token], token_owners[token] = weight, owners[begin]
            for place in range(begin, end - 1):
                if characters[place] != weight:
                    straddling[token] = True
