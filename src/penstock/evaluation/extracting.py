"""Finds the code in what a model wrote: a reply with fenced blocks, or a plain continuation.

Replies come with words around the code, several blocks (a solution, then how to call it), fences inside lists, and a
last fence that was never closed because the tokens ran out. The block that defines the function asked for is taken.
"""

import ast
import re
import textwrap
import warnings

_FENCE = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[\w+#.-]*)[^\n]*$", re.MULTILINE)
_PYTHON = {"", "py", "python", "python3", "py3", "ipython"}


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of each fenced block, in order; an unclosed last one goes to the end of the text."""
    blocks, at = [], 0
    while opening := _FENCE.search(text, at):
        closing = re.compile(rf"^[ \t]*{re.escape(opening['fence'])}[ \t]*$", re.MULTILINE).search(text, opening.end())
        end = closing.start() if closing else len(text)
        blocks.append((opening["language"].lower(), textwrap.dedent(text[opening.end() + 1 : end])))
        at = closing.end() if closing else len(text)
    return blocks


def code_of_reply(reply: str, entry_point: str | None = None) -> str:
    """The code of a reply to a request for code.

    Args:
        reply: What the model wrote.
        entry_point: The function that it was to define, where that is known.

    Returns:
        The first Python block that defines the entry point; else the longest Python block, else the longest of any
        language; a reply without a fence as it is.
    """
    blocks = fenced_blocks(reply)
    if not blocks:
        return reply.strip("\n")
    python = [code for language, code in blocks if language in _PYTHON] or [code for _, code in blocks]
    for code in python:
        if entry_point is not None and defines(code, entry_point):
            return code
    return max(python, key=len)


def defines(code: str, name: str) -> bool:
    """Whether code gives a value to a name at its top level; code that does not parse is looked through by line."""
    try:
        return name in defined_names(parsed(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return re.search(rf"^(async[ \t]+def|def|class)[ \t]+{re.escape(name)}\b", code, re.MULTILINE) is not None


def parsed(code: str) -> ast.Module:
    """The syntax tree of code that is not ours: what Python warns of in it is nobody's business here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code)


def defined_names(code: ast.Module) -> set[str]:
    """The names that functions, classes and assignments at the top level give a value to."""
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
