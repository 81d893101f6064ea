"""What an objective made of a document, read back from its row: which slots are words, and what the others are for.

Places decide, not ids: the objective's own `restore` says in which slot each of the document's words stands, so words
that happen to be sentinels are told from sentinels. Only added tokens are named by their ids, of which no two roles
share one. (Infilling at characters encodes words anew, so there ids decide.) Of an objective of the user's own only
the prefix is known.

Costs: one restoration a document, some microseconds a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from penstock.loader import Loader
from penstock.objectives import Denoise, Infill

TEXT = "text"
WORD_ROLES = frozenset({"input", "target", TEXT, "prefix", "suffix", "middle", "prefix and middle"})
"""All other roles are of tokens that the objective or the loader added."""

Array = np.ndarray[Any, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Slots of a row that lie side by side and serve one purpose."""

    begin: int
    """First slot."""
    end: int
    """One after the last slot."""
    part: str
    """Of the rewritten document: inputs and targets; prefix, suffix and middle; text where it is one."""
    role: str
    """Of each token: input, target, sentinel (in the place of a span, and before the span), mode, input end, …"""
    span: int = -1
    """Number of the span, from 0, whose sentinel or words these are; −1: none."""
    word: int = -1
    """Number of the first of them among the document's words; −1: not its words."""

    @property
    def is_added(self) -> bool:
        """Whether these are no words of the document."""
        return self.role not in WORD_ROLES


def stretches_of(rewriting: Any, piece: Any, tokens: Any, begin: int, prefix: int) -> tuple[Stretch, ...]:
    """The stretches of one document in a row, in order; none where it is as it was.

    Args:
        rewriting: Of its source.
        piece: Its line of the plan.
        tokens: [slots] its tokens in the row.
        begin: Its first slot.
        prefix: So many slots of it see each other.
    """
    if rewriting.is_causal:
        return ()
    head, tail, length = (int(part[0]) for part in rewriting.words(piece[None]))
    # An EOS stands before what only fills the document up, which only objectives in Python do.
    filling = rewriting.write(piece).padding if rewriting.is_staged else 0
    eos = len(tokens) - tail - filling
    inner = np.delete(np.asarray(tokens), slice(eos, eos + tail))[head:]
    key = int(rewriting.keys(piece[None])[0])
    if not length or not (found := _read(rewriting.objective, inner, length, key, prefix - head, filling)):
        return ()
    found = [replace(each, begin=each.begin + head, end=each.end + head) for each in found]
    behind = [replace(each, begin=each.begin + tail, end=each.end + tail) for each in found if each.begin >= eos]
    before = [each for each in found if each.begin < eos]
    parts = [
        *([Stretch(begin=0, end=1, part=found[0].part, role="BOS")] if head else []),
        *before,
        *([Stretch(begin=eos, end=eos + 1, part=before[-1].part, role="EOS")] if tail else []),
        *behind,
    ]
    return tuple(replace(each, begin=each.begin + begin, end=each.end + begin) for each in parts)


def pieces_of_step(loader: Loader, step: int) -> list[Array]:
    """The lines of the plan for each row of a step, [pieces, columns] each; moves the loader to the step."""
    plan = loader.seek(step)._planner.next()
    return [] if plan is None else np.split(plan.pieces, plan.row_starts[1:-1])


def rewritings_of(loader: Loader) -> list[Any]:
    """What is done with the documents of each source."""
    return list(loader._plan.rewritings)


def in_order(stretches: Sequence[Stretch]) -> list[Stretch]:
    """The stretches that hold words, in the order of the document."""
    return sorted((each for each in stretches if each.word >= 0), key=lambda each: each.word)


def _read(objective: Any, tokens: Array, length: int, key: int, prefix: int, filling: int) -> list[Stretch]:
    if isinstance(objective, Denoise):
        return _read_denoised(objective, tokens, length, key)
    if isinstance(objective, Infill):
        return _read_infilled(objective, tokens, length, key, filling)
    if prefix <= 0:
        return []
    end = len(tokens) - filling
    rest = [Stretch(begin=prefix, end=end, part="rest", role=TEXT)] if prefix < end else []
    return [Stretch(begin=0, end=prefix, part="prefix", role="prefix"), *rest, *_filled_up(end, tokens, "rest")]


def _filled_up(end: int, tokens: Array, part: str) -> list[Stretch]:
    return [Stretch(begin=end, end=len(tokens), part=part, role="filling")] if end < len(tokens) else []


def _read_denoised(objective: Denoise, tokens: Array, length: int, key: int) -> list[Stretch]:
    words, owners = np.full((2, len(tokens)), -1)
    places = objective.restore(np.arange(len(tokens), dtype=np.int32), length, key)
    words[places] = np.arange(length)
    spans = objective.spans(length, key)
    for number, (begin, end) in enumerate(spans):
        owners[places[begin:end]] = number
    roles = np.where(owners >= 0, "target", "input" if spans else TEXT).astype(object)
    names = _names_of(objective)
    for slot in np.flatnonzero(words < 0).tolist():
        roles[slot], owners[slot] = names[int(tokens[slot])]
    if not spans:
        return _grouped(words, roles, owners, np.full(len(tokens), TEXT, object))
    if objective.final_sentinel:
        roles[-1], owners[-1] = "final sentinel", -1
    bar = int(np.flatnonzero(roles == "target")[0])
    bar -= int(roles[bar - 1] == "sentinel")
    return _grouped(words, roles, owners, np.where(np.arange(len(tokens)) < bar, "inputs", "targets"))


def _names_of(objective: Denoise) -> dict[int, tuple[str, int]]:
    """Role of each id that is added, and the span that a sentinel stands for."""
    named = [(task.mode, ("mode", -1)) for task in objective.tasks]
    named.append((objective.input_end, ("input end", -1)))
    named += [(sentinel, ("sentinel", number)) for number, sentinel in enumerate(objective.sentinels or ())]
    return {token: role for token, role in named if isinstance(token, int)}


def _grouped(words: Array, roles: Array, owners: Array, parts: Array) -> list[Stretch]:
    """Stretches of slots that are alike, and whose words follow each other."""
    breaks = (roles[1:] != roles[:-1]) | (owners[1:] != owners[:-1]) | (parts[1:] != parts[:-1])
    breaks |= (words[1:] >= 0) & (words[1:] != words[:-1] + 1)
    begins = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    return [
        Stretch(
            begin=begin,
            end=end,
            part=str(parts[begin]),
            role=str(roles[begin]),
            span=int(owners[begin]),
            word=int(words[begin]),
        )
        for begin, end in zip(begins, [*begins[1:], len(words)], strict=True)
    ]


def _read_infilled(objective: Infill, tokens: Array, length: int, key: int, filling: int) -> list[Stretch]:
    order = objective.task(length, key)
    if order == "causal":
        return []
    _, middle_id, suffix_id, *_ = objective.tokens or ()
    added = np.ones(len(tokens), bool)
    if objective.split == "token":
        added[objective.restore(np.arange(len(tokens), dtype=np.int32), length, key)] = False
    suffix, middle = (int(np.flatnonzero(added & (tokens == token))[0]) for token in (suffix_id, middle_id))
    end = len(tokens) - filling
    first, last = suffix - 1, end - middle - 1
    if order == "PSM":
        words = [("prefix", 0, 1, suffix, 0, -1), ("suffix", suffix, suffix + 1, middle, first + last, -1)]
        words.append(("middle", middle, middle + 1, end, first, 0))
    else:
        # Nothing in the row tells where the prefix ends and the middle begins, which is what the model sees, too.
        words = [("prefix", 0, 1, 1, 0, -1), ("suffix", 1, 2, middle, last, -1)]
        words.append(("prefix and middle", middle, middle + 1, end, 0, -1))
    found = []
    for role, at, begin, stop, word, span in words:
        token = "middle token" if at == middle else f"{role} token"
        found.append(Stretch(begin=at, end=begin, part=role, role=token, span=span))
        if begin < stop:
            found.append(Stretch(begin=begin, end=stop, part=role, role=role, span=span, word=word))
    return [*found, *_filled_up(end, tokens, found[-1].part)]
