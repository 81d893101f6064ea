"""Is a resumed run the same, bit for bit? Five settings; and what a checkpoint costs.

    python benchmarks/gpu/09_resume.py --output results

Each run is ended after some steps and resumed; losses are compared with an uninterrupted run's.
`equal`: all of them, to the last bit. `stands_still`: seconds between the end of a step and the
beginning of the next one, where a checkpoint is begun between them.
"""

import statistics
from contextlib import suppress
from pathlib import Path
from typing import Any

import penstock as ps
from common import Data, Figures, Report, Watch, folder, own_model


class EndedError(Exception):
    """Stands for a kill."""


class Resume:
    """Runs of one model on one set of data."""

    def __init__(self, report: Report, place: Path) -> None:
        self.report, self.place = report, place
        self.data = Data(place, 400 if report.toy else 3000, 20.0 if report.toy else 800.0)
        self.steps, self.every, self.cut = (6, 2, 5) if report.toy else (20, 5, 13)

    def run(self, output: Path, watch: Watch, *, resume: bool = False, **settings: Any) -> Any:
        """Train, or go on."""
        slots = 64 if self.report.toy else 8192
        loader = ps.Loader(ps.Source(self.data.web), sequence_length=slots, rows_per_step=2)
        return ps.train(
            own_model(self.report),
            loader,
            output=output,
            steps=self.steps,
            warmup_steps=0,
            on_step=watch,
            resume=resume,
            progress=False,
            **settings,
        )

    def compare(self, name: str, **settings: Any) -> Figures:
        """An uninterrupted run and one that is ended and resumed."""
        checkpoints = {"every": self.every, "keep": 2} | settings.pop("checkpoints", {})
        settings["checkpoints"] = checkpoints
        watch = Watch()
        whole = self.run(self.place / f"{name}-whole", watch, **settings)

        def end(step: int) -> None:
            if step == self.cut:
                raise EndedError

        with suppress(EndedError):
            self.run(self.place / f"{name}-cut", Watch(end), **settings)
        again = self.run(self.place / f"{name}-cut", Watch(), resume=True, **settings)
        pairs = [
            (one["loss"], two["loss"])
            for one, two in zip(whole.metrics, again.metrics, strict=True)
        ]
        gaps = [
            after - before - record["seconds"] - record["wait_seconds"]
            for before, after, record in zip(
                watch.ends, watch.ends[1:], watch.records[1:], strict=False
            )
        ]
        saves = gaps[self.every - 1 :: self.every]
        return {
            "equal": all(one == two for one, two in pairs),
            "largest_difference": max(abs(one - two) for one, two in pairs),
            "first_difference": next((n + 1 for n, (a, b) in enumerate(pairs) if a != b), None),
            "stands_still": statistics.median(saves),
            "between_other_steps": statistics.median(gaps),
        }


def main() -> None:
    report = Report(__file__, __doc__)
    settings: dict[str, dict[str, Any]] = {
        "deterministic": {"deterministic": True},
        "not deterministic": {"deterministic": False},
        "bfloat16": {"precision": "bfloat16"},
        "checkpointing": {"activation_checkpointing": "full"},
        "Muon": {"optimizer": "muon"},
        "saved beside": {"checkpoints": {"asynchronous": True}},
        "saved at a standstill": {"checkpoints": {"asynchronous": False}},
    }
    if not report.toy:
        settings["compiled"] = {"compile": True}
    with folder() as place:
        resume = Resume(report, place)
        for name, given in settings.items():
            report.part(name, resume.compare, name, **given)
    report.done()


if __name__ == "__main__":
    main()
