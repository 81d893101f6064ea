"""A problem whose answer is code: what the model is asked, and the tests of what it wrote.

Code and tests run in two processes of one sandbox, see `sandbox`; so neither the tests nor what they expect can be
reached by the code.
"""

import ast
import re
from dataclasses import dataclass
from typing import Any, final

from penstock.errors import RecordError
from penstock.evaluation.extracting import code_of_reply, cut_at, defined_names, defines, parsed


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
    tests: str
    """The program that tests a solution; it calls it by `function_of_solution(name)`."""
    canonical: str
    """The benchmark's own solution, as a continuation of `given`."""

    def of_canonical(self) -> str:
        """The code of the benchmark's own solution."""
        return self.given + self.canonical

    def of_completion(self, text: str) -> str:
        """The code of a continuation of the prompt."""
        return self.given + cut_at(text, self.stops)

    def of_reply(self, text: str) -> str:
        """The code in a chat model's reply.

        A reply with the function as a whole stands after the helpers and imports of the prompt; one that goes on with
        the function's body continues the prompt.
        """
        code = code_of_reply(text, self.entry_point)
        if self.entry_point is None:
            return code
        continues = not defines(code, self.entry_point) and code[:1] in (" ", "\t")
        head = re.search(rf"^def[ \t]+{re.escape(self.entry_point)}\b", self.given, re.MULTILINE)
        before = self.given if continues or head is None else self.given[: head.start()]
        return before + code


def calls_of(tests: str, canonical: str, where: str) -> str:
    """Definitions for tests that stand below the code they test: each name of the code calls the solution.

    Args:
        tests: The tests, which call functions and classes of the code by their names.
        canonical: The benchmark's own code, which defines them.
        where: The file, for errors.

    Raises:
        RecordError: One of them is no Python.
    """
    try:
        used = {node.id for node in ast.walk(parsed(tests)) if isinstance(node, ast.Name)}
        names = sorted(used & defined_names(parsed(canonical)))
    except (SyntaxError, ValueError) as error:
        raise RecordError(
            f"{where}: the benchmark's own code or tests are no Python: {error}; fetch the file again"
        ) from error
    return "".join(f"{name} = function_of_solution({name!r})\n" for name in names)


def field(record: dict[str, Any], name: str, where: str) -> Any:
    """A field of a record.

    Raises:
        RecordError: The record lacks it.
    """
    if record.get(name) is None:
        found = ", ".join(sorted(key for key, value in record.items() if value is not None))
        raise RecordError(f"{where}: a record has no {name!r}; it has {found}; is it the file of this benchmark?")
    return record[name]
