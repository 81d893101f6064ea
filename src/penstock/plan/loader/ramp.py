"""The rows of each step: one number, or numbers that change at given steps (a batch ramp), and sums
of them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate
from math import gcd
from typing import final

from penstock.core.errors import ConfigError
from penstock.plan.loader.mixture import whole

MOST_ROWS = 1 << 24
"""Of a step."""
MOST_STEPS = 1 << 40


@final
class Ramp:
    """Rows of steps, which change at given steps.

    Args:
        rows_per_step: A number; or first step → rows from it on, beginning with step 0: `{0: 32,
            1000: 64}`. Steps may be texts, as keys of a run file are.

    Raises:
        ConfigError: It is something else, says nothing of step 0, or a number is out of range.
    """

    def __init__(self, rows_per_step: object) -> None:
        given = rows_per_step if isinstance(rows_per_step, Mapping) else {0: rows_per_step}
        steps = {_step(step): whole("rows_per_step", rows) for step, rows in given.items()}
        if len(steps) < len(given) or 0 not in steps:
            raise ConfigError(
                "rows_per_step must be a number, or each first step with the rows from it on, "
                "beginning with step 0, "
                f'such as {{"0": 32, "1000": 64}}; got {rows_per_step!r}'
            )
        for rows in steps.values():
            if not 1 <= rows <= MOST_ROWS:
                bound = "at least 1" if rows < 1 else f"at most {MOST_ROWS:,}"
                raise ConfigError(f"rows_per_step must be {bound}, got {rows}")
        self.phases = tuple(sorted(steps.items()))
        """(first step, rows of a step from it on), by rising step."""
        self._starts = [step for step, _ in self.phases]
        lengths = (
            after - before for before, after in zip(self._starts, self._starts[1:], strict=False)
        )
        self._before = [
            0,
            *accumulate(
                length * rows for length, (_, rows) in zip(lengths, self.phases, strict=False)
            ),
        ]

    @property
    def value(self) -> int | dict[int, int]:
        """What was given, in its simplest form."""
        return self.phases[0][1] if len(self.phases) == 1 else dict(self.phases)

    @property
    def largest(self) -> int:
        """Rows of the largest step."""
        return max(rows for _, rows in self.phases)

    @property
    def divisor(self) -> int:
        """The largest number that divides the rows of every step."""
        return gcd(*(rows for _, rows in self.phases))

    def rows(self, step: int) -> int:
        """Rows of step number `step`."""
        return self.phases[bisect_right(self._starts, step) - 1][1]

    def before(self, step: int) -> int:
        """Rows of all steps before step number `step`."""
        phase = bisect_right(self._starts, step) - 1
        first, rows = self.phases[phase]
        return self._before[phase] + (step - first) * rows

    def steps(self, rows: int) -> int:
        """Steps that a number of rows fills; the last one may be short."""
        phase = max(bisect_left(self._before, rows) - 1, 0)
        first, each = self.phases[phase]
        return first - -(rows - self._before[phase]) // each

    def __str__(self) -> str:
        if len(self.phases) == 1:
            return f"{self.phases[0][1]:,}"
        (_, rows), *later = self.phases
        return ", then ".join(
            [f"{rows:,}", *(f"{rows:,} from step {step:,} on" for step, rows in later)]
        )


def _step(value: object) -> int:
    step = (
        int(value)
        if isinstance(value, str) and value.isdecimal()
        else whole("rows_per_step: a step", value)
    )
    if not 0 <= step < MOST_STEPS:
        raise ConfigError(f"rows_per_step: a step must be from 0 to 2^40, got {step}")
    return step
