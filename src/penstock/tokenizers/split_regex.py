"""Reads regular expressions by which tokenizers split text, as Oniguruma does in the tokenizers
package.

The subset of published tokenizers: characters, sets, groups, alternatives, quantifiers, and a look
at the next character. Sets are not read here but asked of the package (`character_sets`), so each
means what it means there. A possessive quantifier of one set is a greedy one after which no
character of the set follows. Anything else is refused, with its reason.
"""

import re
from dataclasses import dataclass
from typing import final

from penstock.core.errors import TokenizerError
from penstock.tokenizers.character_sets import CHARACTERS, UNIFORM


@final
@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a set: an expression to be asked of the package, or code points.

    `letters`: those among them whose case is ignored, in lower case.
    """

    what: str | tuple[int, ...]
    letters: str = ""


@final
@dataclass(frozen=True, slots=True)
class Ahead:
    """The next character is one of these sets, or the text ends and `end` holds; or, `negated`,
    neither.
    """

    sets: tuple[Characters, ...]
    end: bool = False
    negated: bool = False


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One part after another."""

    parts: "tuple[Node, ...]"


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """The first part with which the rest matches."""

    parts: "tuple[Node, ...]"


@final
@dataclass(frozen=True, slots=True)
class Repeat:
    """A part `low` to `high` times (None: any number), first as often as possible, or, `lazy`, as
    rarely.
    """

    part: "Node"
    low: int
    high: int | None
    lazy: bool = False


Node = Characters | Ahead | Row | Choice | Repeat

MOST_REPEATS = 200
_FOLDS = {"s": "\u017f", "k": "\u212a"}
"""What ASCII letters match without regard to case, besides their two cases."""
_DOUBLES = ("ss", "ff", "fi", "fl", "st")
"""Letters that, without regard to case, together match one character, such as ß."""
_CONTROLS = {"r": 13, "n": 10, "t": 9, "f": 12, "v": 11, "a": 7, "e": 27}
_SETS = frozenset("sSdDwWhH")
_QUANTIFIER = re.compile(r"[?*+]|\{(\d*)(,?)(\d*)\}")
_HEX = re.compile(r"\\x\{([0-9A-Fa-f]{1,6})\}|\\u([0-9A-Fa-f]{4})|\\x([0-7][0-9A-Fa-f])")
_PROPERTY = re.compile(r"\\[pP]\{\^?[A-Za-z_ &0-9-]+\}")


def read_pattern(pattern: str) -> Node:
    """Read a regular expression.

    Raises:
        TokenizerError: It has something that is not supported, or may match nothing at all.
    """
    reader = _Reader(pattern)
    node = reader.choice(fold=False)
    if reader.at < len(pattern):
        raise reader.refusal("an unmatched parenthesis")
    if may_be_empty(node):
        raise TokenizerError(f"its pattern {_short(pattern)} may match nothing")
    if any(pair in _DOUBLES for pair in _neighbours(node)):
        raise TokenizerError(
            f"its pattern {_short(pattern)} ignores the case of letters that together match one "
            f"character ({', '.join(_DOUBLES)})"
        )
    return node


def literal(text: str) -> Node:
    """The expression of one text.

    Raises:
        TokenizerError: It is empty.
    """
    if not text:
        raise TokenizerError("it splits at an empty text")
    return Row(tuple(Characters((ord(character),)) for character in text))


def may_be_empty(node: Node) -> bool:
    """Whether an expression may match no character."""
    if isinstance(node, Characters):
        return False
    if isinstance(node, Ahead):
        return True
    if isinstance(node, Repeat):
        return node.low == 0 or may_be_empty(node.part)
    if isinstance(node, Row):
        return all(map(may_be_empty, node.parts))
    return any(map(may_be_empty, node.parts))


def _neighbours(node: Node) -> set[str]:
    """Pairs of letters without regard to case that may follow each other."""
    if isinstance(node, Characters | Ahead):
        return set()
    parts = (node.part,) if isinstance(node, Repeat) else node.parts
    found = {pair for part in parts for pair in _neighbours(part)}
    if isinstance(node, Repeat) and node.high != 1:
        parts = (node.part, node.part)
    if not isinstance(node, Choice):
        for place in range(1, len(parts)):
            lasts = _outer(Row(parts[:place]), last=True)
            firsts = _outer(parts[place], last=False)
            found |= {a + b for a in lasts for b in firsts}
    return found


def _outer(node: Node, *, last: bool) -> set[str]:
    """Letters without regard to case with which a match may begin, or end."""
    if isinstance(node, Characters):
        return set(node.letters)
    if isinstance(node, Ahead):
        return set()
    if isinstance(node, Repeat):
        return _outer(node.part, last=last)
    found: set[str] = set()
    for part in reversed(node.parts) if last else node.parts:
        found |= _outer(part, last=last)
        if isinstance(node, Row) and not may_be_empty(part):
            break
    return found


class _Reader:
    """Reads an expression from left to right."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def refusal(self, what: str) -> TokenizerError:
        return TokenizerError(
            f"its pattern {_short(self.pattern)} has {what} at character {self.at}"
        )

    def choice(self, *, fold: bool) -> Node:
        """Alternatives up to the end of their group."""
        parts = [self.row(fold=fold)]
        while self._take("|"):
            parts.append(self.row(fold=fold))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def row(self, *, fold: bool) -> Node:
        parts: list[Node] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            parts.append(self._quantified(self._atom(fold=fold)))
        return parts[0] if len(parts) == 1 else Row(tuple(parts))

    def _take(self, text: str) -> bool:
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def _atom(self, *, fold: bool) -> Node:
        character = self.pattern[self.at]
        if character == "(":
            return self._group(fold=fold)
        if character == "[":
            return self._set(fold=fold)
        if character == "\\":
            return self._escape(fold=fold)
        if character in "^*+?{":
            raise self.refusal(repr(character))
        self.at += 1
        if character == "$":
            # It matches before every line end, as in Ruby.
            return Ahead((Characters((10,)),), end=True)
        if character == ".":
            return Characters(".")
        return self._one(ord(character), fold=fold)

    def _one(self, code: int, *, fold: bool) -> Characters:
        if code >= UNIFORM:
            raise self.refusal("a rare character")
        return self._folded(chr(code)) if fold else Characters((code,))

    def _folded(self, characters: str) -> Characters:
        """One of these, and of what they match without regard to case."""
        if not characters.isascii():
            raise self.refusal("case to be ignored beyond ASCII")
        letters = "".join(filter(str.isalpha, characters.lower()))
        folds = "".join(_FOLDS.get(letter, "") for letter in letters)
        every = {*characters, *letters, *letters.upper(), *folds}
        return Characters(tuple(sorted(map(ord, every))), letters)

    def _group(self, *, fold: bool) -> Node:
        begin = self.at
        if self._take("(?i:"):
            fold = True
        elif self._take("(?=") or self._take("(?!"):
            return self._ahead(negated=self.pattern[self.at - 1] == "!")
        elif self._take("(?>"):
            return self._atomic(self._closed(fold=fold))
        elif not self._take("(?:"):
            if self.pattern.startswith(("(?", "(*"), self.at):
                raise self.refusal(f"the group {self.pattern[begin : begin + 4]!r}")
            self.at += 1
        return self._closed(fold=fold)

    def _closed(self, *, fold: bool) -> Node:
        node = self.choice(fold=fold)
        if not self._take(")"):
            raise self.refusal("an unmatched parenthesis")
        return node

    def _ahead(self, *, negated: bool) -> Ahead:
        node = self._closed(fold=False)
        sets: list[Characters] = []
        end = False
        for part in node.parts if isinstance(node, Choice) else (node,):
            if isinstance(part, Characters):
                sets.append(part)
            elif isinstance(part, Ahead) and not part.negated:
                sets += part.sets
                end = end or part.end
            else:
                raise self.refusal("a look at more than one character")
        return Ahead(tuple(sets), end=end, negated=negated)

    def _atomic(self, node: Node) -> Node:
        """A group that gives nothing back: of one set, as with a possessive quantifier."""
        if isinstance(node, Characters):
            return node
        bounds = (node.low, node.high) if isinstance(node, Repeat) and not node.lazy else None
        if isinstance(node, Repeat) and bounds in ((0, None), (1, None), (0, 1)):
            return self._possessive(node.part, node.low, node.high)
        raise self.refusal("an atomic group of more than one repeated set")

    def _set(self, *, fold: bool) -> Characters:
        """A set in brackets, whose extent alone is read here."""
        begin, depth = self.at, 0
        while True:
            if self.at >= len(self.pattern):
                raise self.refusal("a set without an end")
            character = self.pattern[self.at]
            self.at += 1
            if character == "\\":
                self._check_escape_in_set()
            elif character == "[":
                depth += 1
                _ = self._take("^")
                if self.pattern.startswith("]", self.at):
                    raise self.refusal("a set that begins with ]")
            elif character == "]":
                depth -= 1
                if depth == 0:
                    break
            elif UNIFORM <= ord(character) < CHARACTERS - 1:
                raise self.refusal("a rare character")
        text = self.pattern[begin : self.at]
        return self._folded_set(text) if fold else Characters(text)

    def _check_escape_in_set(self) -> None:
        found = _HEX.match(self.pattern, self.at - 1)
        if found is None:
            self.at += 1
            return
        code = int(next(filter(None, found.groups())), 16)
        if UNIFORM <= code < CHARACTERS - 1:
            raise self.refusal("a rare character")
        self.at = found.end()

    def _folded_set(self, text: str) -> Characters:
        inner = text[1:-1]
        if not (inner.isascii() and inner.isalnum()):
            raise self.refusal(f"the set {text!r} without regard to case")
        return self._folded(inner)

    def _escape(self, *, fold: bool) -> Node:
        if found := _HEX.match(self.pattern, self.at):
            self.at = found.end()
            return self._one(int(next(filter(None, found.groups())), 16), fold=fold)
        if found := _PROPERTY.match(self.pattern, self.at):
            if fold:
                raise self.refusal("a property without regard to case")
            self.at = found.end()
            return Characters(found[0])
        name = self.pattern[self.at + 1 : self.at + 2]
        if name in _SETS and name:
            if fold:
                raise self.refusal("a set without regard to case")
            self.at += 2
            return Characters(f"\\{name}")
        if name == "z":
            self.at += 2
            return Ahead((), end=True)
        if name in _CONTROLS or (name.isascii() and name and not name.isalnum()):
            self.at += 2
            return self._one(_CONTROLS.get(name, ord(name)), fold=fold)
        raise self.refusal(f"the escape \\{name}")

    def _quantified(self, node: Node) -> Node:
        found = _QUANTIFIER.match(self.pattern, self.at)
        if found is None:
            if self.pattern.startswith("{", self.at):
                raise self.refusal("'{'")
            return node
        if isinstance(node, Ahead):
            raise self.refusal("a quantifier after a look ahead")
        self.at = found.end()
        low, high = self._bounds(found)
        interval = found[0][0] == "{"
        if self._take("+"):
            # Oniguruma takes + after {m,n} for a quantifier of its own.
            node = (
                Repeat(self._repeat(node, low, high, lazy=False), 1, None)
                if interval
                else self._possessive(node, low, high)
            )
        else:
            node = self._repeat(node, low, high, lazy=self._take("?"))
            if isinstance(node, Repeat) and node.lazy and interval and low == high:
                raise self.refusal("a fixed number and ?")
        if _QUANTIFIER.match(self.pattern, self.at):
            raise self.refusal("a quantifier after a quantifier")
        return node

    def _bounds(self, found: re.Match[str]) -> tuple[int, int | None]:
        if found[0] in "?*+":
            return int(found[0] == "+"), 1 if found[0] == "?" else None
        if not found[1] and not found[3]:
            raise self.refusal(repr(found[0]))
        low = int(found[1] or 0)
        high = low if not found[2] else int(found[3]) if found[3] else None
        if low > MOST_REPEATS or (high is not None and not low <= high <= MOST_REPEATS):
            raise self.refusal(f"the quantifier {found[0]}")
        return low, high

    def _repeat(self, node: Node, low: int, high: int | None, *, lazy: bool) -> Node:
        if may_be_empty(node) and high != 1:
            raise self.refusal("a repeated part that may match nothing")
        return Repeat(node, low, high, lazy)

    def _possessive(self, node: Node, low: int, high: int | None) -> Node:
        if not isinstance(node, Characters):
            raise self.refusal("a possessive quantifier of more than one set")
        none_follows = Ahead((node,), negated=True)
        if high == 1:
            return Choice((node, none_follows))
        return Row((Repeat(node, low, high), none_follows))


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:80] + "…")
