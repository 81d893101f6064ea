"""`penstock eval`: how well a model predicts held-out data, and how well it does on real tasks."""

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.options import AsJson
from penstock.cli.writing import ContextLength, Device, Model, Opened, Threads, load_opened
from penstock.evaluation.tasks import LM_EVAL

SLOTS_CPU, SLOTS_GPU = 8, 64
"""Replies that are written at the same time."""


def run(
    model: Model,
    data: Annotated[
        list[str] | None, typer.Option("--data", "-d", metavar="DATASET", help="A dataset's folder; may be repeated.")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            "-t",
            metavar="NAME",
            help="mmlu, gsm8k, humaneval, humaneval_plus, mbpp, mbpp_plus, bits_per_byte or lm-eval:NAME; may be "
            "repeated.",
        ),
    ] = None,
    task_data: Annotated[
        list[str] | None,
        typer.Option("--task-data", metavar="NAME=PATH", help="Where a task's data are; by default the hub."),
    ] = None,
    shots: Annotated[
        int | None, typer.Option(metavar="N", help="Solved problems before each; by default as published.", min=0)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Problems of each task at most; of MMLU, of each subject.", min=1)
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--plain", metavar="", help="Ask through the model's chat template.")
    ] = False,
    samples: Annotated[int, typer.Option(metavar="N", help="Replies to each problem.", min=1)] = 1,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Of replies; 0 takes the likeliest token.", min=0)
    ] = 0.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Of a reply, at most.", min=1)] = 512,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", metavar="", help="Run code that the model wrote where there is no sandbox.")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Of what is drawn.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Keep answers and results.json there, and go on from them."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(metavar="N", help="Use about so many rows of each dataset; by default all.", min=1)
    ] = None,
    context_length: ContextLength = None,
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model: its loss on datasets (--data), and its scores on tasks (--task).

    Of a dataset every document counts once, packed as in training and apart from the others. Bits per byte can be
    compared between tokenizers; they are told where all of a dataset's text is trained and all rows are used. The
    task bits_per_byte measures any text file with any model.

    Code that a model writes runs in a sandbox. An evaluation that was stopped goes on when it is started again with
    the same -o.
    """
    from penstock.errors import ConfigError

    if not data and not task:
        raise ConfigError("nothing to measure: give --data DATASET, --task NAME, or both")
    settings = _settings(
        task or [], task_data or [], shots=shots, limit=limit, chat=chat, samples=samples, temperature=temperature,
        max_tokens=max_tokens, unsafe=unsafe, seed=seed,
    )  # fmt: skip
    tasks = _make(settings)
    found = load_opened(model, context_length=context_length, device=device, threads=threads)
    if chat and found.template is None:
        raise ConfigError(f"{model}: it has no chat template; leave out --chat")
    losses = _losses(found, data or [], rows)
    scores = _run_tasks(found, settings, tasks, output) if settings else []
    told = {"model": model, "step": found.run.step, "context_length": found.context_length, "results": losses}
    if settings:
        told["tasks"] = [one.to_json() for one in scores]
    if output is not None:
        _save(output, told)
    if as_json:
        import json

        print(json.dumps(told))
    else:
        _print(losses, scores)


def _settings(names: list[str], places: list[str], **options: Any) -> list[Any]:
    """The settings of each task that is asked for.

    Raises:
        ConfigError: Data are given for a task that is not.
    """
    from penstock.errors import ConfigError
    from penstock.evaluation.settings import TaskSettings

    data = {}
    for one in places:
        name, sign, path = one.partition("=")
        if not sign or not path or name not in names:
            raise ConfigError(f"--task-data {one}: due is NAME=PATH, with a NAME that --task gives too")
        data[name] = path
    return [TaskSettings(name=name, data=data.get(name), **options) for name in dict.fromkeys(names)]


def _make(settings: list[Any]) -> list[Any]:
    """The tasks, before a model is loaded for them; None for those of lm-eval.

    Raises:
        ConfigError: There is no such task, or no data.
    """
    from penstock.evaluation.tasks import check_name, make_task

    for one in settings:
        check_name(one.name)
    return [None if one.name.startswith(LM_EVAL) else make_task(one) for one in settings]


def _run_tasks(found: Opened, settings: list[Any], tasks: list[Any], output: Path | None) -> list[Any]:
    """The results of all tasks, in the order in which they were asked for."""
    from penstock.evaluation.running import run_task
    from penstock.evaluation.subject import Subject

    subject = Subject(
        found.model,
        found.tokenizer,
        context_length=found.context_length,
        stop_ids=found.run.stop_ids,
        template=found.template,
        slots=SLOTS_CPU if found.model.device.type == "cpu" else SLOTS_GPU,
    )
    results: list[Any] = []
    for one, made in zip(settings, tasks, strict=True):
        if made is None:
            results += _run_lm_eval(subject, one, output)
        else:
            results.append(
                run_task(made, subject, answers=None if output is None else output / one.name / "answers.jsonl")
            )
    return results


def _run_lm_eval(subject: Any, one: Any, output: Path | None) -> Any:
    from penstock.evaluation.lm_eval_running import run_lm_eval

    return run_lm_eval(
        subject,
        [one.name.removeprefix(LM_EVAL)],
        limit=one.limit,
        shots=one.shots,
        chat=one.chat,
        seed=one.seed,
        folder=None if one.data is None else Path(one.data),
        cache=output,
    )


def _losses(found: Opened, data: list[str], rows: int | None) -> list[dict[str, Any]]:
    """The figures of all datasets; a dataset that does not fit is refused before any is measured."""
    from penstock.training.distributed import Ranks
    from penstock.training.evaluators import HeldOutLoss

    looks = [
        HeldOutLoss(
            one,
            sequence_length=found.context_length,
            tokenizer=found.tokenizer,
            model=found.model,
            ranks=Ranks(found.model.device),
            rows=rows,
        )
        for one in data
    ]
    return [{"data": one, **look(found.model)} for one, look in zip(data, looks, strict=True)]


def _save(output: Path, told: dict[str, Any]) -> None:
    """`results.json`, whole or not at all."""
    import json

    from penstock.errors import OutputError

    try:
        output.mkdir(parents=True, exist_ok=True)
        partial = output / "results.json.partial"
        partial.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(output / "results.json")
    except OSError as error:
        raise OutputError(f"{output}: cannot be written: {error.strerror}; give another folder with -o") from error


def _print(losses: list[dict[str, Any]], scores: list[Any]) -> None:
    from penstock.inspection import make_console

    console = make_console()
    if losses:
        console.print(_loss_table(losses))
    if losses and scores:
        console.print()
    if scores:
        from penstock.evaluation.results import table

        console.print(table(scores))


def _loss_table(results: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("dataset", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("targets", "nats a target", "bits a byte"):
        table.add_column(name, justify="right")
    for found in results:
        bits = found.get("bits_per_byte")
        table.add_row(
            found["data"], f"{found['targets']:,.0f}", f"{found['loss']:.4f}", "–" if bits is None else f"{bits:.4f}"
        )
    return table
