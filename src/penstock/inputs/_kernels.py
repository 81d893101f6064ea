"""Compiled writing of model inputs. The shape that is fast: copy whole rows, then patch the few places that differ."""

from penstock.compiled import inline_kernel


@inline_kernel
def shift_targets(tokens, targets):
    """Targets of a row as if it were one document: tokens shifted by 1 … D, −100 at the end ([T], [D, T])."""
    slots = len(tokens)
    for distance in range(1, targets.shape[0] + 1):
        row = targets[distance - 1]
        for i in range(slots - distance):
            row[i] = tokens[i + distance]
        for i in range(max(slots - distance, 0), slots):
            row[i] = -100


@inline_kernel
def blank(targets, weights, begin, end):
    """Take [begin, end) of one distance out of the loss; `weights` may be empty."""
    for i in range(begin, end):
        targets[i] = -100
    if len(weights):
        for i in range(begin, end):
            weights[i] = 0.0


@inline_kernel
def describe_row(begin, end, number, positions, document_ids):
    """Positions and document number of the slots [begin, end); an array that is not wanted is empty."""
    if len(positions):
        for i in range(end - begin):
            positions[begin + i] = i
    if len(document_ids):
        for i in range(begin, end):
            document_ids[i] = number
