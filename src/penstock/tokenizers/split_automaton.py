"""Compiles the expression of a split to an automaton that reads each character once.

A state of the automaton is a list of places in the expression, in the order in which a backtracking
matcher would try them; what comes after a place that has matched is dropped. So the automaton finds
the match that a backtracking matcher finds: not the longest, but that of the first alternatives. A
transition knows the class of the next character, or that the text ends, which decides looks ahead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from penstock.core.arrays import Bool, Bytes, Int64
from penstock.core.errors import TokenizerError
from penstock.tokenizers.character_sets import matching, one_of, partition
from penstock.tokenizers.split_regex import Ahead, Characters, Choice, Node, Repeat, Row

MOST_STEPS = 5000
MOST_STATES = 3000
END = 0
"""The class of the end of the text."""


@final
@dataclass(frozen=True, slots=True)
class Automaton:
    """Finds matches at a place of a text.

    Attributes:
        classes: The class of each character, uint8 [0x110000], 1 and more.
        targets: The next state by the class of the next character, int64 [states, classes]. State 1
            is the first, and state 0 has no way on.
        ends: Whether a match ends before that character, bool [states, classes].
    """

    classes: Bytes
    targets: Int64
    ends: Bool


def compile_split(node: Node) -> Automaton:
    """Compile an expression that matches at least one character.

    Raises:
        TokenizerError: It needs too many states or classes.
    """
    characters = list(dict.fromkeys(_characters(node)))
    sets = [
        matching(one.what) if isinstance(one.what, str) else one_of(one.what) for one in characters
    ]
    classes, members = partition(sets)
    program = _Program({one: members[:, place] for place, one in enumerate(characters)})
    start = program.add(node, program.matched)
    rows = _determine(program, start, len(members))
    targets = np.array([[target for target, _ in row] for row in rows], np.int64)
    ends = np.array([[is_end for _, is_end in row] for row in rows], np.bool_)
    return Automaton(classes, targets, ends)


def _characters(node: Node) -> Iterator[Characters]:
    if isinstance(node, Characters):
        yield node
    elif isinstance(node, Ahead):
        yield from node.sets
    else:
        for part in (node.part,) if isinstance(node, Repeat) else node.parts:
            yield from _characters(part)


class _Program:
    """The expression as numbered steps, each a kind, what it takes, and the numbers that come next.

    Kinds: "read" a character of some classes, "look" at the next one, "fork" to several steps in
    the order of their preference, and "match".
    """

    def __init__(self, members: dict[Characters, Bool]) -> None:
        self._members = members
        self.kinds: list[str] = []
        self.takes: list[Bool | None] = []
        self.nexts: list[list[int]] = []
        self.matched = self._step("match", None, [])

    def _step(self, kind: str, takes: Bool | None, nexts: list[int]) -> int:
        if len(self.kinds) >= MOST_STEPS:
            raise TokenizerError(f"its pattern has more than {MOST_STEPS} steps")
        self.kinds.append(kind)
        self.takes.append(takes)
        self.nexts.append(nexts)
        return len(self.kinds) - 1

    def add(self, node: Node, after: int) -> int:
        """Add an expression and return its first step; `after` comes after it."""
        if isinstance(node, Characters):
            return self._step("read", self._members[node], [after])
        if isinstance(node, Ahead):
            return self._step("look", self._holds(node), [after])
        if isinstance(node, Choice):
            return self._step("fork", None, [self.add(part, after) for part in node.parts])
        if isinstance(node, Row):
            for part in reversed(node.parts):
                after = self.add(part, after)
            return after
        return self._repeat(node, after)

    def _holds(self, node: Ahead) -> Bool:
        """The classes before which a look ahead holds."""
        held = np.zeros(len(next(iter(self._members.values()))), np.bool_)
        for one in node.sets:
            held |= self._members[one]
        held[END] = node.end
        return ~held if node.negated else held

    def _repeat(self, node: Repeat, after: int) -> int:
        if node.high is None:
            begin = self._step("fork", None, [])
            inside = self.add(node.part, begin)
            self.nexts[begin] = [after, inside] if node.lazy else [inside, after]
        else:
            begin = after
            for _ in range(node.high - node.low):
                inside = self.add(node.part, begin)
                begin = self._step("fork", None, [after, inside] if node.lazy else [inside, after])
        for _ in range(node.low):
            begin = self.add(node.part, begin)
        return begin

    def advance(self, places: Sequence[int], kind: int) -> tuple[tuple[int, ...], bool]:
        """The places after a character of a class, and whether a match ends before it."""
        found: dict[int, None] = {}
        seen: set[int] = set()
        open_places = list(reversed(places))
        while open_places:
            place = open_places.pop()
            if place in seen:
                continue
            seen.add(place)
            step, takes = self.kinds[place], self.takes[place]
            if step == "match":
                return tuple(found), True
            if step == "fork":
                open_places += reversed(self.nexts[place])
            elif takes is not None and bool(takes[kind]):
                if step == "look":
                    open_places += self.nexts[place]
                elif kind != END:
                    found.setdefault(self.nexts[place][0])
        return tuple(found), False


def _determine(program: _Program, start: int, kinds: int) -> list[list[tuple[int, bool]]]:
    """The states that can be reached: for each class the next one, and whether a match ends before
    it.
    """
    numbers: dict[tuple[int, ...], int] = {(): 0, (start,): 1}
    waiting = [(), (start,)]
    rows: list[list[tuple[int, bool]]] = []
    while len(rows) < len(waiting):
        row = []
        for kind in range(kinds):
            places, ends = program.advance(waiting[len(rows)], kind)
            if places not in numbers:
                if len(numbers) >= MOST_STATES:
                    raise TokenizerError(f"its pattern needs more than {MOST_STATES} states")
                numbers[places] = len(numbers)
                waiting.append(places)
            row.append((numbers[places], ends))
        rows.append(row)
    return rows
