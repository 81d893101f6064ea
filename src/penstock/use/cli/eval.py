"""`penstock eval`: a model's loss on held-out data, and its scores on benchmarks."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.core.folders import is_url
from penstock.use.cli import used
from penstock.use.cli.model_options import ContextLength, Device, Model, Threads
from penstock.use.cli.options import AsJson

if TYPE_CHECKING:
    from penstock.learn.evaluation.tasks import TaskSettings


def run(
    model: Model,
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
    shots: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of solved examples in the prompt; by default as published.",
            min=0,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Maximum problems of each task; for MMLU, of each subject.", min=1
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--plain", metavar="", help="Prompt through the model's chat template."
        ),
    ] = False,
    samples: Annotated[int, typer.Option(metavar="N", help="Replies per problem.", min=1)] = 1,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy.", min=0)
    ] = 0.0,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", help="Maximum tokens of a reply.", min=1)
    ] = 512,
    unsafe: Annotated[
        bool,
        typer.Option(
            "--unsafe",
            metavar="",
            help="Run code written by the model even if there is no sandbox.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of sampling.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Save answers and results.json here, and resume from them.",
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(metavar="N", help="Use about N rows of each dataset; by default all.", min=1),
    ] = None,
    context_length: ContextLength = None,
    device: Device = "auto",
    threads: Threads = None,
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
    figures = ps.open_run(model).evaluate(
        # A path is the place of data, whatever its name.
        *(one if is_url(one) else Path(one) for one in data or ()),
        *_tasks(
            task or [],
            task_data or [],
            shots=shots,
            limit=limit,
            chat=chat,
            samples=samples,
            temperature=temperature,
            max_tokens=max_tokens,
            unsafe=unsafe,
            seed=seed,
        ),
        output=output,
        rows=rows,
        context_length=context_length,
        device=device,
        threads=threads,
    )
    if as_json:
        print(json.dumps(figures))
    else:
        _print(figures["results"], figures.get("tasks", []))


def _tasks(names: list[str], places: list[str], **options: Any) -> "list[TaskSettings]":
    """The settings of each requested task.

    Raises:
        ConfigError: --task-data names a task that --task does not.
    """
    data = {}
    for one in places:
        name, sign, path = one.partition("=")
        if not sign or not path or name not in names:
            raise ConfigError(
                f"--task-data {one}: expected NAME=PATH, with a NAME that --task also gives"
            )
        data[name] = path
    make = ps.evaluation.TaskSettings
    return [make(name=name, data=data.get(name), **options) for name in dict.fromkeys(names)]


def _print(losses: list[dict[str, Any]], scores: list[dict[str, Any]]) -> None:

    console = ps.inspection.make_console()
    if losses:
        console.print(_loss_table(losses))
    if losses and scores:
        console.print()
    if scores:
        console.print(
            used.evaluation_results.table([ps.evaluation.Results.from_json(one) for one in scores])
        )


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
