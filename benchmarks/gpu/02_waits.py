"""Where does the host wait for the GPU? Each wait of some steps, with its line.

    python benchmarks/gpu/02_waits.py --output results

On CUDA by `torch.cuda.set_sync_debug_mode("warn")`, which warns at each synchronizing call; reads
of pinned copies are not among them. Without CUDA, calls that would wait there are counted: `item`,
`tolist`, `nonzero` and `float`, `int`, `bool` of tensors. Wanted: one read a step, whatever the
number of passes.
"""

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from common import ROOT, Data, Figures, Report, Watch, folder, own_model, their_model, train
from penstock.models.settings import BlockSettings

CALLS = ("item", "tolist", "nonzero", "__float__", "__int__", "__bool__")
FIRST, LAST = 3, 6
"""Waits of the steps after the first and up to the last of these are counted."""


def place() -> str:
    """The innermost line of penstock, or of whoever has called."""
    frames = [one for one in traceback.extract_stack() if "common.py" not in one.filename]
    ours = [one for one in frames if "/penstock/" in one.filename]
    found = ours[-1] if ours else frames[-3]
    return f"{Path(found.filename).relative_to(ROOT) if ours else found.filename}:{found.lineno}"


@contextmanager
def counted(lines: Counter[str], on: list[bool]) -> Iterator[None]:
    """Count waits by line while `on` holds true."""
    if torch.cuda.is_available():

        def note(message: Any, *_: Any, **__: Any) -> None:
            if on[0] and "synchroniz" in str(message):
                lines[place()] += 1

        before, warnings.showwarning = warnings.showwarning, note
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
                warnings.showwarning = before
        return
    plain = {name: getattr(torch.Tensor, name) for name in CALLS}

    def noting(name: str) -> Any:
        def call(self: torch.Tensor, *given: Any, **more: Any) -> Any:
            if on[0]:
                lines[f"{place()} {name}"] += 1
            return plain[name](self, *given, **more)

        return call

    for name in CALLS:
        setattr(torch.Tensor, name, noting(name))
    try:
        yield
    finally:
        for name, one in plain.items():
            setattr(torch.Tensor, name, one)


def waits(report: Report, model: Any, data: Path, passes: int, **settings: Any) -> Figures:
    """Waits a step, by line, with a number of passes a step."""
    lines: Counter[str] = Counter()
    on = [False]

    def switch(step: int) -> None:
        on[0] = FIRST <= step < LAST

    slots = 64 if report.toy else 4096
    loader = ps.Loader(ps.Source(data), sequence_length=slots, rows_per_step=passes)
    with counted(lines, on):
        train(
            report,
            model,
            loader,
            steps=LAST + 1,
            watch=Watch(switch),
            rows_per_pass=1,
            **settings,
        )
    steps = LAST - FIRST
    return {
        "waits_a_step": sum(lines.values()) / steps,
        "lines": {line: count / steps for line, count in lines.most_common()},
    }


def main() -> None:
    report = Report(__file__, __doc__)
    with folder() as where:
        data = Data(where, 200 if report.toy else 4000, 20.0 if report.toy else 800.0)
        experts = {"blocks": {"e": BlockSettings(experts=4, balance=0.01)}, "pattern": ("e",)}
        for passes in (1, 4):
            for name, made in (("ours", {}), ("experts", experts)):
                model = own_model(report, **made)
                report.part(f"{name}, {passes} passes", waits, report, model, data.web, passes)
            kept = own_model(report)
            report.part(
                f"not deterministic, {passes} passes",
                waits,
                report,
                kept,
                data.web,
                passes,
                deterministic=False,
            )

            def theirs(passes: int = passes) -> Figures:
                model = f"hf:{their_model(report, where)}"
                return waits(report, model, data.web, passes)

            report.part(f"llama, {passes} passes", theirs)
    report.done()


if __name__ == "__main__":
    main()
