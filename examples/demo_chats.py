"""Conversations about the standard library, out of its own documentation; the same on every machine
of one Python.

Of every documented function comes one conversation, of a kind that its name decides: a question
with its documentation as the answer; the same with a second question, about its arguments; or a
question that the assistant answers after it has called a function that looks the documentation up.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>")
"""What the template `chat.jinja` writes around turns; the tokenizer must know them as control
tokens.
"""
QUESTIONS = ("What does {name} do?", "Explain {name}.", "What is {name} for?")
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The documentation of a function.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
}
ANSWER_CHARACTERS = (25, 400)
"""Least and most of an answer."""


def conversations(modules: Iterable[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """A record in OpenAI's layout for every documented function of some modules, given as (name,
    source).
    """
    least, most = ANSWER_CHARACTERS
    for module, source in modules:
        for name, function in functions(ast.parse(source), module):
            answer = " ".join((ast.get_docstring(function) or "").split("\n\n")[0].split())
            if least <= len(answer) <= most:
                yield conversation(
                    name, ast.unparse(function.args).removeprefix("self").lstrip(", "), answer
                )


def functions(owner: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The public functions of a module and the public methods of its classes, with their full
    names.
    """
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            full = f"{name}.{node.name}"
            if isinstance(node, ast.FunctionDef):
                yield full, node
            else:
                yield from functions(node, full)


def conversation(name: str, arguments: str, answer: str) -> dict[str, Any]:
    """One conversation about one function."""
    choice = hashlib.sha256(name.encode()).digest()
    asked = {"role": "user", "content": QUESTIONS[choice[0] % len(QUESTIONS)].format(name=name)}
    answered = {"role": "assistant", "content": answer}
    if choice[1] % 4 == 0:
        more = {"role": "user", "content": "And its arguments?"}
        listed = f"{name}({arguments})" if arguments else "It takes none."
        return {"messages": [asked, answered, more, {"role": "assistant", "content": listed}]}
    if choice[1] % 4 == 1:
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"name": name}}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        found = {"role": "tool", "content": answer}
        return {"messages": [asked, called, found, answered], "tools": [LOOK_UP]}
    return {"messages": [asked, answered]}


def modules_of(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """(name, source) of modules of the standard library, named as they are imported."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in paths:
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__"), path.read_text(encoding="utf-8")
