"""A problem whose answer is code: what the model is asked, and the program that tests what it wrote."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from penstock.errors import RecordError
from penstock.evaluation.extracting import code_of_reply, cut_at, defines


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CodeProblem:
    """One problem of a benchmark of code."""

    name: str
    """Its id in the benchmark."""
    prompt: str
    """The text that the model continues."""
    request: str
    """The same as a message to a chat model, which asks for code in a fenced block."""
    entry_point: str | None
    """The function that the code must define, where the benchmark names it."""
    given: str
    """Code that stands before what the model wrote: the part of the prompt that a continuation continues."""
    stops: tuple[str, ...]
    """Texts that end a continuation."""
    program: Callable[[str], str]
    """The whole program, code and tests, from the code of a solution."""
    canonical: str
    """The benchmark's own solution, as a continuation of `given`."""

    def of_canonical(self) -> str:
        """The program that tests the benchmark's own solution."""
        return self.program(self.given + self.canonical)

    def of_completion(self, text: str) -> str:
        """The program that tests a continuation of the prompt."""
        return self.program(self.given + cut_at(text, self.stops))

    def of_reply(self, text: str) -> str:
        """The program that tests the code in a chat model's reply.

        A reply with the function as a whole stands after the helpers and imports of the prompt; one that goes on with
        the function's body continues the prompt.
        """
        code = code_of_reply(text, self.entry_point)
        if self.entry_point is None:
            return self.program(code)
        continues = not defines(code, self.entry_point) and code[:1] in (" ", "\t")
        head = re.search(rf"^def[ \t]+{re.escape(self.entry_point)}\b", self.given, re.MULTILINE)
        before = self.given if continues or head is None else self.given[: head.start()]
        return self.program(before + code)


def field(record: dict[str, Any], name: str, where: str) -> Any:
    """A field of a record.

    Raises:
        RecordError: The record lacks it.
    """
    if record.get(name) is None:
        found = ", ".join(sorted(key for key, value in record.items() if value is not None))
        raise RecordError(f"{where}: a record has no {name!r}; it has {found}; is it the file of this benchmark?")
    return record[name]
