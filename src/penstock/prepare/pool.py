"""Runs tasks in order, several at once, and takes what they say; who does the work is a crew.

There are two crews: processes of this machine, and tasks of a Ray cluster. Both do the same functions with the same
state, so what comes out does not depend on the crew.
"""

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal, Protocol, Self, final

from penstock.errors import PenstockError

Message = tuple[int, Literal["report", "done", "failed"], Any]
"""Number of the task; what happened; and what it reported, its result, or its error."""

Function = Callable[[Any, Any, Callable[..., None]], Any]
"""What a task does: `(state, argument, report) → result`. It can be imported by name."""


class Crew(Protocol):
    """Does tasks, several at once."""

    def has_room(self) -> bool:
        """Whether another task may be started now."""

    def start(self, number: int, name: str, function: Function, argument: Any) -> None:
        """Start a task; `name` is for messages."""

    def receive(self) -> Iterable[Message]:
        """Wait until some running task says something."""

    def renew(self) -> None:
        """Give the tasks that follow the state as it is now; none is running."""

    def close(self) -> None:
        """End what is running; nothing of it may write any more when this returns."""


@final
class Pool:
    """Runs functions `(state, argument, report) → result` with a crew, or here when there is none.

    Args:
        state: What every task needs; the crew has it too.
        crew: Who does the tasks; closed when the pool is left.
    """

    def __init__(self, state: Any, crew: Crew | None) -> None:
        self._state, self._crew = state, crew

    def renew(self) -> None:
        """Tell the crew that the state changed; between two runs."""
        if self._crew is not None:
            self._crew.renew()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._crew is not None:
            self._crew.close()

    def run(self, function: Function, tasks: Iterable[tuple[str, Any]], report: Callable[..., None]) -> Iterator[Any]:
        """Do all tasks, handed out in order; yield results as they come.

        Args:
            function: Called with the state, the argument, and a function that sends to `report`.
            tasks: (name for messages, argument), taken as there is room.
            report: Called here with what a task reports.

        Raises:
            PenstockError: A task failed; of several, the error of the first in order.
        """
        if self._crew is None:
            for _, argument in tasks:
                yield function(self._state, argument, report)
            return
        crew, waiting = self._crew, enumerate(tasks)
        running: set[int] = set()
        failed: tuple[int, PenstockError] | None = None
        while True:
            while failed is None and crew.has_room() and (task := next(waiting, None)) is not None:
                number, (name, argument) = task
                crew.start(number, name, function, argument)
                running.add(number)
            if not running or (failed is not None and failed[0] < min(running)):
                break
            for number, kind, value in crew.receive():
                if kind == "report":
                    report(*value)
                    continue
                running.discard(number)
                if kind == "done":
                    yield value
                elif failed is None or number < failed[0]:
                    failed = (number, value)
        if failed is not None:
            raise failed[1]
