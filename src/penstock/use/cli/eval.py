"""`penstock eval`: a model's loss on held-out data, and its scores on benchmarks."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.core.folders import is_url
from penstock.use.cli import used
from penstock.use.cli.declared_options import options, takes
from penstock.use.cli.options import MODEL, OPENING, AsJson, Given

if TYPE_CHECKING:
    from penstock.learn.evaluation.tasks import TaskSettings


@takes(
    settings=(
        options(
            "learn.evaluation.tasks.TaskSettings",
            "shots",
            "limit",
            "chat",
            "samples",
            "temperature",
            "max_tokens",
            "overlap",
            "unsafe",
            "seed",
        ),
    ),
    given=(MODEL, options("use.runs.run.Run.evaluate", "output", "rows", "worst"), OPENING),
)
def run(
    *,
    given: Given,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", "-d", metavar="DATASET", help="Dataset folder, or a glob; may be repeated."
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            "-t",
            metavar="NAME",
            help=(
                "mmlu, gsm8k, humaneval, humaneval_plus, mbpp, mbpp_plus, bits_per_byte or "
                "lm-eval:NAME; may be repeated."
            ),
        ),
    ] = None,
    task_data: Annotated[
        list[str] | None,
        typer.Option(
            "--task-data",
            metavar="NAME=PATH",
            help="Location of a task's data; by default the Hugging Face hub.",
        ),
    ] = None,
    settings: Given,
    as_json: AsJson = False,
) -> None:
    r"""Measure a model: its loss on datasets (--data), and its scores on tasks (--task).

    Each document of a dataset counts once. Documents are packed as in training and isolated from
    each other. Bits per byte are comparable between tokenizers; they are reported if all text of a
    dataset is trained and all rows are used. The task bits_per_byte measures any text file with any
    model.

    Code that a model writes runs in a sandbox. A stopped evaluation resumes if it is started again
    with the same -o.

    Example:
        penstock eval runs/first --data data/stories/validation
        penstock eval runs/first --task bits_per_byte \
            --task-data bits_per_byte=held-out.txt
    """
    if not data and not task:
        raise ConfigError("nothing to measure: give --data DATASET, --task NAME, or both")
    figures = ps.open_run(given.pop("model")).evaluate(
        # A path is the place of data, whatever its name.
        *(one if is_url(one) else Path(one) for one in data or ()),
        *_tasks(task or [], task_data or [], settings),
        **given,
    )
    if as_json:
        print(json.dumps(figures))
    else:
        _print(figures["results"], figures.get("tasks", []))


def _tasks(names: list[str], places: list[str], options: Given) -> "list[TaskSettings]":
    """The settings of each requested task.

    Raises:
        ConfigError: --task-data names a task that --task does not, or an option has no meaning for
            any task.
    """
    data = {}
    for one in places:
        name, sign, path = one.partition("=")
        if not sign or not path or name not in names:
            raise ConfigError(
                f"--task-data {one}: expected NAME=PATH, with a NAME that --task also gives"
            )
        data[name] = path
    return used.evaluation_tasks.settings_of_all([*dict.fromkeys(names)], data, options)


def _print(losses: list[dict[str, Any]], scores: list[dict[str, Any]]) -> None:

    console = ps.inspection.make_console()
    if losses:
        console.print(_loss_table(losses))
    for found in losses:
        for line in _worst(found):
            console.print(line, markup=False)
    if losses and scores:
        console.print()
    if scores:
        console.print(
            used.evaluation_results.table([ps.evaluation.Results.from_json(one) for one in scores])
        )


def _worst(found: dict[str, Any]) -> list[str]:
    """The documents with the highest loss of a dataset, if they were asked for."""
    if "accuracy" not in found:
        return []
    lines = [value for name, value in found.items() if name.startswith("worst.")]
    share = f"{found['data']}: {found['accuracy']:.2%} of targets predicted right; the worst:"
    return ["", share, *lines]


def _loss_table(results: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("dataset", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("targets", "nats a target", "bits a byte"):
        table.add_column(name, justify="right")
    for found in results:
        bits = found.get("bits_per_byte")
        table.add_row(
            found["data"],
            f"{found['targets']:,.0f}",
            f"{found['loss']:.4f}",
            "–" if bits is None else f"{bits:.4f}",
        )
    return table
