"""Code problems: the prompt for the model, the code in its reply, and the tests.

The code is a plain continuation, or is taken from the fenced blocks of a reply. Replies have words
around the code, several blocks (a solution, then how to call it or the tests again), fences inside
lists, and a last fence that is never closed because the tokens ran out. What a model thinks before
it replies, up to `</think>`, is no part of the reply. The first block that defines what the tests
call is used.

Code and tests run in two processes of one sandbox (see `sandbox`), so the code can reach neither
the tests nor the expected values.
"""

import ast
import re
import textwrap
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, final

from penstock.core.errors import RecordError
from penstock.learn.evaluation.tasks import after_thoughts

_FENCE = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[\w+#.-]*)[^\n]*$", re.MULTILINE
)
_PYTHON = {"", "py", "python", "python3", "py3", "ipython"}
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    str: ((str,), "a text"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    list: ((list,), "a list"),
}
"""Kind of a field → types of its values, and its name."""


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of each fenced block, in order; an unclosed last block ends with the
    text.
    """
    blocks, at = [], 0
    while opening := _FENCE.search(text, at):
        closing = re.compile(rf"^[ \t]*{re.escape(opening['fence'])}[ \t]*$", re.MULTILINE).search(
            text, opening.end()
        )
        end = closing.start() if closing else len(text)
        blocks.append((opening["language"].lower(), textwrap.dedent(text[opening.end() + 1 : end])))
        at = closing.end() if closing else len(text)
    return blocks


def code_of_reply(reply: str, names: Collection[str] = ()) -> str:
    """The code in a reply to a request for code.

    Args:
        reply: The model's text.
        names: The functions and classes that it should define, as far as they are known.

    Returns:
        The Python block that defines most of the names, the first of several; if none defines any,
        the longest Python block, else the longest of any language. A reply without a fence is
        returned as it is, without what the model thought.
    """
    reply = after_thoughts(reply)
    blocks = fenced_blocks(reply)
    if not blocks:
        return reply.strip("\n")
    python = [code for language, code in blocks if language in _PYTHON] or [
        code for _, code in blocks
    ]
    defined = [sum(defines(code, name) for name in names) for code in python]
    return python[defined.index(max(defined))] if any(defined) else max(python, key=len)


def defines(code: str, name: str) -> bool:
    """Whether code defines a name at its top level; code that does not parse is searched line by
    line.
    """
    try:
        return name in defined_names(parsed(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return (
            re.search(rf"^(async[ \t]+def|def|class)[ \t]+{re.escape(name)}\b", code, re.MULTILINE)
            is not None
        )


def parsed(code: str) -> ast.Module:
    """The syntax tree of foreign code, without Python's warnings about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code)


def defined_names(code: ast.Module) -> set[str]:
    """The names that functions, classes and assignments define at the top level."""
    return {name for statement in code.body for name in _names(statement)}


def _names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return set()


def cut_at(text: str, stops: tuple[str, ...]) -> str:
    """A text up to the first of the stops in it."""
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CodeProblem:
    """One problem of a code benchmark."""

    name: str
    """Its id in the benchmark."""
    prompt: str
    """The text that the model continues."""
    request: str
    """The same as a message to a chat model; it asks for code in a fenced block."""
    names: tuple[str, ...]
    """The functions and classes of the code that the tests call."""
    given: str
    """Code before the model's text: the part of the prompt that the text continues."""
    stops: tuple[str, ...]
    """Texts that end a continuation."""
    tests: str
    """The program that tests a solution. It calls the solution by `function_of_solution(name)`."""
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

        A reply with the whole function is put after the helpers and imports of the prompt; a reply
        with only the function's body continues the prompt.
        """
        code = code_of_reply(text, self.names)
        if not self.given:
            return code
        whole = any(defines(code, name) for name in self.names)
        continues = not whole and code[:1] in (" ", "\t")
        wanted = "|".join(map(re.escape, self.names)) or "(?!)"  # Which matches nothing.
        head = re.search(rf"^def[ \t]+({wanted})\b", self.given, re.MULTILINE)
        before = self.given if continues or head is None else self.given[: head.start()]
        return before + code


def called_names(tests: str, canonical: str, where: str) -> tuple[str, ...]:
    """The functions and classes of the tested code that its tests use, in order.

    Args:
        tests: The tests, which call functions and classes of the code by name.
        canonical: The benchmark's own code, which defines them.
        where: The file, for errors.

    Raises:
        RecordError: One of them is not Python.
    """
    try:
        used = {node.id for node in ast.walk(parsed(tests)) if isinstance(node, ast.Name)}
        return tuple(sorted(used & defined_names(parsed(canonical))))
    except (SyntaxError, ValueError) as error:
        raise RecordError(
            f"{where}: the benchmark's own code or tests are not valid Python: {error}; fetch "
            "the file again"
        ) from error


def calls_of(names: Collection[str]) -> str:
    """Definitions to put before tests that use these names: each calls the solution."""
    return "".join(f"{name} = function_of_solution({name!r})\n" for name in names)


def field(record: dict[str, object], name: str, where: str, kind: type = str) -> Any:
    """A field of a record.

    Args:
        record: The record.
        name: Of the field.
        where: Its place, for errors.
        kind: `str`, `int`, `float` (any number) or `list`.

    Raises:
        RecordError: The record lacks it, or it holds something else.
    """
    if record.get(name) is None:
        found = ", ".join(sorted(key for key, value in record.items() if value is not None))
        raise RecordError(
            f"{where}: a record has no {name!r}, only {found}; give the file of this benchmark"
        )
    types, expected = _KINDS[kind]
    if not isinstance(record[name], types) or isinstance(record[name], bool):
        raise RecordError(
            f"{where}: {name!r} is {record[name]!r:.60}; expected {expected}; give the file "
            "of this benchmark"
        )
    return record[name]
