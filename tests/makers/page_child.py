"""The interpreter of a page: a process that runs blocks in one namespace, as a notebook's kernel
does.

A request is a dictionary: code, page, line of the page, and the file for what the block prints. The
reply is another: what the last expression shows, and the error.
"""

import ast
import base64
import os
import sys
import traceback
import types
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


def serve(asked: Connection, environment: dict[str, str], folder: str) -> None:
    """Be the interpreter of a page in its folder, until nobody asks any more."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = [""]
    sys.path.insert(0, "")  # a reader's folder comes first on the path of modules
    main = types.ModuleType(
        "__main__"
    )  # without a file, so that processes it starts do not run it again
    sys.modules["__main__"] = main
    with suppress(EOFError):
        while True:
            request = asked.recv()
            _print_to(request["printed"])
            reply = _run(request, main.__dict__)
            sys.stdout.flush()
            sys.stderr.flush()
            asked.send(reply)


def _print_to(path: str) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def _run(request: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    page = request["page"]
    try:
        # Blank lines before it, so that a traceback has the lines of the page.
        tree = ast.parse("\n" * (request["line"] - 1) + request["code"], page)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, page, "exec"), names)
        if not isinstance(last, ast.Expr):
            return {}
        value = eval(compile(ast.Expression(last.value), page, "eval"), names)
        return {"shown": {} if value is None else _shown(value)}
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this file's own frame
        text = "".join(traceback.format_exception(type(error), error, trace))
        print("".join(traceback.format_exception_only(error)).rstrip(), file=sys.stderr)
        return {"error": text}


def _shown(value: object) -> dict[str, str]:
    shown = {"text/plain": repr(value)}
    for kind, method in (
        ("text/html", "_repr_html_"),
        ("image/svg+xml", "_repr_svg_"),
        ("image/png", "_repr_png_"),
    ):
        make = getattr(value, method, None)
        found = make() if callable(make) and not isinstance(value, type) else None
        if found is not None:
            shown[kind] = base64.b64encode(found).decode() if isinstance(found, bytes) else found
    return shown
