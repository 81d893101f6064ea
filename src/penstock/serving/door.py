"""What serving asks of an engine: sequences join and leave between steps. `penstock.generation.Engine` is one."""

from collections.abc import Sequence
from typing import Protocol

from penstock.generation import Event, Sampling


class BatchEngine(Protocol):
    """Writes sequences side by side; belongs to one thread."""

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, choice: int) -> int:
        """Let a sequence join at the next step; its number."""
        ...

    def cancel(self, sequence: int) -> None:
        """Let a sequence leave; nothing where it has ended."""
        ...

    def step(self) -> Sequence[Event]:
        """One more token for sequences that are there; each one's last event has a finish_reason."""
        ...
