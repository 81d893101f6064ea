"""Which pages of a pool hold which tokens: tables of sequences, uses of pages, and what is free.

Sequences with the same beginning share its pages. A page that several use is never written: who
writes takes a copy of it first. Page 0 belongs to nobody: it takes what padding writes. All of this
is on the host.
"""

from collections import Counter
from collections.abc import Iterable
from typing import final


@final
class Pages:
    """The pages of sequences.

    Attributes:
        size: Tokens of a page.
        tables: Of each sequence, its pages in order.
        total: Number of pages, including page 0.
    """

    def __init__(self, sequences: int, size: int) -> None:
        self.size, self.total = size, 1
        self.tables: list[list[int]] = [[] for _ in range(sequences)]
        self._uses = [1]
        self._free: list[int] = []

    @property
    def free(self) -> int:
        """Number of pages that no sequence uses."""
        return len(self._free)

    def add(self, total: int) -> None:
        """Count more pages, up to `total`."""
        # The lowest is taken first.
        self._free[:0] = reversed(range(self.total, total))
        self._uses += [0] * (total - self.total)
        self.total = total

    def cut(self, sequence: int, length: int) -> None:
        """Let go of what lies behind the first `length` tokens of a sequence."""
        table, kept = self.tables[sequence], -(-length // self.size)
        for page in table[kept:]:
            self._uses[page] -= 1
            if not self._uses[page]:
                self._free.append(page)
        del table[kept:]

    def share(self, source: int, target: int, length: int) -> None:
        """Make a sequence the first `length` tokens of another, without a copy."""
        if source == target:
            self.cut(source, length)
            return
        taken = self.tables[source][: -(-length // self.size)]
        for page in taken:
            self._uses[page] += 1
        self.cut(target, 0)
        self.tables[target] = taken

    def needed(self, growing: Iterable[tuple[int, int, int]]) -> int:
        """Number of free pages that new tokens take.

        Args:
            growing: Sequence, number of its tokens, number of its new tokens; no sequence twice.
        """
        uses: Counter[int] = Counter()
        found = 0
        for sequence, start, count in growing:
            if not count:
                continue
            found += -(-(start + count) // self.size) - -(-start // self.size)
            if start % self.size:
                page = self.tables[sequence][start // self.size]
                if self._uses[page] - uses[page] > 1:
                    # The last one to write keeps the page.
                    uses[page] += 1
                    found += 1
        return found

    def grow(self, sequence: int, start: int, count: int) -> tuple[int, int] | None:
        """Make room for new tokens behind the first `start`; there must be as many free pages as
        `needed` says.

        Returns:
            The page whose content must be copied, and the one that takes its place; None: none.
        """
        self.cut(sequence, start)
        table, copied = self.tables[sequence], None
        if count and start % self.size and self._uses[table[-1]] > 1:
            page = self._take()
            self._uses[table[-1]] -= 1
            copied, table[-1] = (table[-1], page), page
        while len(table) * self.size < start + count:
            table.append(self._take())
        return copied

    def _take(self) -> int:
        page = self._free.pop()
        self._uses[page] = 1
        return page
