"""The interpreter of a page: a process that runs blocks in one namespace, as a notebook's kernel
does.

A request is a line of JSON on standard input: code, page, line of the page, and the file for what
the block prints. The reply is a line of JSON: what the last expression shows, and the error.
"""

import ast
import base64
import json
import os
import sys
import traceback
import types
from typing import Any


def serve() -> None:
    """Answer requests until standard input ends."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    main = types.ModuleType(
        "__main__"
    )  # without a file, so that processes it starts do not run it again
    sys.modules["__main__"] = main
    for line in requests:
        request = json.loads(line)
        _print_to(request["printed"])
        reply = _run(request, main.__dict__)
        sys.stdout.flush()
        sys.stderr.flush()
        print(json.dumps(reply), file=replies, flush=True)


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
