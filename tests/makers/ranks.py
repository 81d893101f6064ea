"""Ranks of a run as processes of this machine: each is a process of its own, as by torchrun."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from makers.forked import Forked
from makers.processes import free_port, rank_environment


def run_ranks(
    script: Path, arguments: Sequence[Any], processes: int, folder: Path, **more: str
) -> list[tuple[int, str, str]]:
    """Run a script as so many ranks; (exit status, stdout, stderr) of each.

    Args:
        script: The program.
        arguments: What it is given.
        processes: Ranks.
        folder: Where they run, and what they say is kept.
        **more: What else their environment says.
    """
    port, children = free_port(), []
    words = [script, *arguments]
    try:
        for rank in range(processes):
            outputs = [folder / f"{script.stem}-{rank}.{kind}" for kind in ("out", "err")]
            environment = {**rank_environment(rank, processes, port), **more}
            children.append(Forked(words, environment, folder, outputs))
        said = [child.communicate() for child in children]
    finally:
        for child in children:
            child.kill()
    return [(child.returncode, *texts) for child, texts in zip(children, said, strict=True)]


def run_processes(
    script: Path, code: str, *arguments: Any, processes: int
) -> list[tuple[str, str]]:
    """Write a script and run it as so many ranks, which must succeed; (stdout, stderr) of each."""
    script.write_text(textwrap.dedent(code))
    # Somebody else may take the port before rank 0 does.
    for _ in range(3):
        ended = run_ranks(script, arguments, processes, script.parent)
        if not any("EADDRINUSE" in err for _, _, err in ended):
            break
    assert not any(code for code, _, _ in ended), "\n".join(err[-3000:] for _, _, err in ended)
    return [(out, err) for _, out, err in ended]
