"""Ranks of a run as processes of this machine, forked from one that has imported torch.

Each is a process of its own, as by torchrun, and runs a script from its first line; only what takes
ten seconds, the imports of torch and transformers, is there already. penstock itself is imported by
each.
"""

import multiprocessing
import os
import runpy
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from makers.processes import free_port, rank_environment
from patience import PATIENCE_SECONDS

PRELOADED = [
    "numba",
    "pyarrow",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    "accelerate",
]


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # torch reads it when it is loaded.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.forkserver.ensure_running()
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before
    return context


def _become(
    words: Sequence[str], environment: Mapping[str, str], folder: str, outputs: Sequence[str]
) -> None:
    """Be `python WORDS` in this folder."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in enumerate(outputs, 1):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    sys.argv[:] = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


def run_ranks(
    script: Path, arguments: Sequence[Any], processes: int, folder: Path
) -> list[tuple[int, str, str]]:
    """Run a script as so many ranks; (exit status, stdout, stderr) of each.

    Args:
        script: The program.
        arguments: What it is given.
        processes: Ranks.
        folder: Where they run, and what they say is kept.
    """
    port, children, outputs = free_port(), [], []
    for rank in range(processes):
        outputs.append([str(folder / f"{script.stem}-{rank}.{kind}") for kind in ("out", "err")])
        words = [str(script), *map(str, arguments)]
        given = (words, rank_environment(rank, processes, port), str(folder), outputs[-1])
        children.append(_context().Process(target=_become, args=given))
    try:
        for child in children:
            child.start()
        for child in children:
            child.join(PATIENCE_SECONDS)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
                child.join()
    said = [
        [Path(path).read_text(encoding="utf-8", errors="replace") for path in pair]
        for pair in outputs
    ]
    return [(child.exitcode, out, err) for child, (out, err) in zip(children, said, strict=True)]


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
