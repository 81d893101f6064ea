"""The answers of a row: paths of its prefix trees, where one answer may have several.

A trajectory whose history was rewritten is one answer of several paths. What is compared or
averaged by answer (rewards, ranks, means over tokens) counts it once, and each of its slots once,
however many of its paths go through it.
"""

from dataclasses import dataclass
from typing import Annotated, Self, final

import numpy as np

from penstock.core.arrays import Bool, Float64, Int64
from penstock.data.shards.format.trees import ANSWER, answer_numbers, value_of_answers
from penstock.plan.inputs.paths import RowPaths


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowAnswers:
    """The answers of one row. A answers, P paths; S slots of all answers, each once for an
    answer.
    """

    paths: RowPaths
    numbers: Annotated[Int64, "paths"]
    """[P] answer of each path, counted from 0 in the order of their first paths."""
    slots: Annotated[Int64, "slots"]
    """[S] slots that have a target in an answer, path after path."""
    owners: Annotated[Int64, "slots"]
    """[S] answer of each entry of `slots`."""
    documents: Annotated[Int64, "answers"]
    """[A] number of each answer's document in the row."""

    @classmethod
    def of(cls, paths: RowPaths) -> Self:
        """The answers of a row's paths: those with the same `answer` in a document; without the
        value, each path is one.
        """
        numbers = answer_numbers(paths.values.get(ANSWER), paths.documents)
        # The last slot of a path has no target in it, whatever stands there for another path.
        inner = np.ones(len(paths.slots), np.bool_)
        inner[paths.starts[1:] - 1] = False
        slots, owners = paths.slots[inner], numbers[paths.owners[inner]]
        count = int(numbers.max(initial=-1)) + 1
        if count < len(paths):
            keys = owners * (int(slots.max(initial=0)) + 1) + slots
            first = np.sort(np.unique(keys, return_index=True)[1])
            slots, owners = slots[first], owners[first]
        documents = np.empty(count, np.int64)
        documents[numbers] = paths.documents
        return cls(paths=paths, numbers=numbers, slots=slots, owners=owners, documents=documents)

    def __len__(self) -> int:
        return len(self.documents)

    def has(self, name: str) -> bool:
        """Whether the data have a value of paths."""
        return name in self.paths.values

    def value(self, name: str, who: str) -> Annotated[Float64, "answers"]:
        """[A] a value of each answer; NaN: not given.

        Raises:
            ConfigError: The data have no such value, or paths of an answer have different ones;
                says who needs it.
        """
        return value_of_answers(name, self.paths.value(name, who), self.numbers)

    def entries(self, trained: Annotated[Bool, "tokens"]) -> tuple[Int64, Int64]:
        """Slots and answers of the entries whose target is trained.

        Args:
            trained: [T] whether the target of each slot of the row is.
        """
        inside = trained[self.slots]
        return self.slots[inside], self.owners[inside]
